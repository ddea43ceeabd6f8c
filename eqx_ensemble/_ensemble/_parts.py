from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .. import _axes
from .._check import is_readable
from .._pytree import PyTree
from ._check_members import check_one_mode

_Path = tuple[Any, ...]


def one_alone(stacked: PyTree, shared: PyTree) -> Any:
    """The model of one member, with its Python floats restored unless they are traced."""

    def number(x: Any, y: Any) -> Any:
        if x is None or type(y) is not float or not is_readable(x):
            return x
        # The shortest of all floats that round to this one: 0.1, as it was given, and not 0.10000000149.
        return float(str(np.asarray(x)[()]))

    return eqx.combine(jax.tree.map(number, stacked, shared, is_leaf=lambda x: x is None), shared)


def with_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Adds the flags `inference` of the layers, which the shared part holds, to the stacked part of a model.

    `equinox.nn.inference_mode` sets every attribute of that name, and can set none that is `None`.
    """

    def put(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or y is None or _axes.is_array(y):
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return y if x is None else x

    if not any(type(y) is bool for y in jax.tree.leaves(shared)):  # flattens in C++, as most models have no flag
        return stacked
    return jtu.tree_map_with_path(put, stacked, shared, is_leaf=lambda x: x is None)


def without_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Removes from the stacked part of a model what `with_flags` added."""

    def cut(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or x is None or y is None:
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return None

    # Within `jax.jit` a flag is a traced scalar, whereas what carries members has an axis.
    if all(_axes.is_array(x) and x.ndim > 0 for x in jax.tree.leaves(stacked)):
        return stacked
    return jtu.tree_map_with_path(cut, stacked, shared, is_leaf=lambda x: x is None)


def _is_inference(path: _Path) -> bool:
    return path[-1:] == (jtu.GetAttrKey("inference"),)
