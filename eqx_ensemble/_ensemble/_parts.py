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
        # The shortest float that rounds to this one: 0.1, as given, not 0.10000000149.
        return float(str(np.asarray(x)[()]))

    return eqx.combine(jax.tree.map(number, stacked, shared, is_leaf=lambda x: x is None), shared)


def with_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Copies the layers' `inference` flags from the shared to the stacked part of a model.

    `equinox.nn.inference_mode` sets every attribute of that name, but cannot set one that is `None`.
    """

    def put(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or y is None or _axes.is_array(y):
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return y if x is None else x

    if not any(type(y) is bool for y in jax.tree.leaves(shared)):  # fast, in C++; most models have no flag
        return stacked
    return jtu.tree_map_with_path(put, stacked, shared, is_leaf=lambda x: x is None)


def without_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Removes the flags that `with_flags` added to the stacked part of a model."""

    def cut(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or x is None or y is None:
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return None

    # Within `jax.jit` a flag is a traced scalar, whereas per-member arrays have an axis.
    if all(_axes.is_array(x) and x.ndim > 0 for x in jax.tree.leaves(stacked)):
        return stacked
    return jtu.tree_map_with_path(cut, stacked, shared, is_leaf=lambda x: x is None)


def _is_inference(path: _Path) -> bool:
    return path[-1:] == (jtu.GetAttrKey("inference"),)
