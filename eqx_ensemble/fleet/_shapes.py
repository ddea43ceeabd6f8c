"""The shapes of members to read from files."""

from typing import Any

import equinox as eqx
import jax

from .._ensemble import Ensemble
from ..checkpoint._structure import is_array_like


def resize(like: Any, count: int) -> Any:
    """The shapes of an ensemble, or of an ensemble and its state, for another number of members; no array data."""
    if not isinstance(like, tuple):
        return _ensemble_of(like, count)
    ensemble, state = like
    return _ensemble_of(ensemble, count), jax.tree.map(lambda x: _with_members(x, count), state)


def _ensemble_of(ensemble: Ensemble[Any], count: int) -> Ensemble[Any]:
    stacked = jax.tree.map(lambda x: _with_members(x, count), ensemble.arrays)
    ids = jax.ShapeDtypeStruct((count,), ensemble.ids.dtype)
    return eqx.filter_eval_shape(Ensemble, stacked, ensemble.shared, ids)


def _with_members(x: Any, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if is_array_like(x) else x
