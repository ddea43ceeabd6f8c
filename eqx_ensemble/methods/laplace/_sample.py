from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ... import _keys
from ..._axes import Each
from ..._compiled import filter_jit
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...plan._map import map_members
from ._member import LaplaceMember

_is_none = lambda x: x is None


def draw(members: Ensemble, ensemble: Ensemble, num_samples: int, key: Any) -> Ensemble[Any]:
    """An ensemble of draws from all members' posteriors."""
    keys = _keys.member_keys(key, members.ids, purpose="laplace")
    arrays = _draw(members, Each(keys), jnp.arange(num_samples))
    shape = lambda x: x.reshape(-1, *x.shape[2:])
    stacked = jax.tree.map(
        lambda old, new: None if old is None else shape(new), ensemble.arrays, arrays, is_leaf=_is_none
    )
    numbers = jnp.arange(num_samples, dtype=jnp.int32)
    ids = (members.ids[:, None] * num_samples + numbers[None]).astype(jnp.int32).ravel()
    return Ensemble(stacked, ensemble.shared, ids)


@filter_jit
def _draw(members: Ensemble, keys: Each, numbers: jax.Array) -> PyTree:
    """The arrays of all draws, each `(members, draws, ...)`."""

    def of_member(member: LaplaceMember, key: jax.Array) -> PyTree:
        posterior = member.posterior
        mean, precision = posterior.selection.vector(member.model), posterior.precision

        def one(number: jax.Array) -> PyTree:
            noise = jax.random.normal(jax.random.fold_in(key, number), precision.shape, precision.dtype)
            away = posterior.curvature.rotate(noise / jnp.sqrt(precision))
            return eqx.filter(posterior.selection.insert(member.model, mean + away), eqx.is_array)

        return jax.vmap(one)(numbers)

    return map_members(of_member)(members, keys)
