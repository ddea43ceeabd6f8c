import jax.numpy as jnp

from .. import _axes
from .._pytree import PyTree
from ._check import check_output, check_string_keys


def plain(tree: PyTree, *, name: str, path: str = "") -> PyTree:
    """Converts a tree to dicts, lists and tuples, which need no class; named tuples become dicts of their fields."""
    if tree is None:
        return None
    if isinstance(tree, tuple) and type(tree) is not tuple and (fields := getattr(tree, "_fields", None)):
        tree = dict(zip(fields, tree, strict=True))
    if type(tree) is dict:
        check_string_keys(tree, path, name=name)
        return {key: plain(value, name=name, path=f"{path}[{key!r}]") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(plain(value, name=name, path=f"{path}[{i}]") for i, value in enumerate(tree))
    if not _axes.is_array(tree):
        check_output(tree, path, name=name)
    return jnp.asarray(tree)
