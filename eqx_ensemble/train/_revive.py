"""Callbacks that bring members back."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from .._build import build
from .._keys import tag
from .._pytree import PyTree
from ..distributed import to_host
from ._meeting import Optimiser
from ._optimiser import is_noise
from ._program import init
from ._state import Status, TrainState


def perturb(hyper: PyTree, key: Key[Array, ""]) -> PyTree:
    """Multiplies each floating-point array of a member's hyperparameters by 0.8 or by 1.2.

    **Arguments:**

    - `hyper`: the hyperparameters of one member.
    - `key`: draws the factors, one per array.

    **Returns:** the new hyperparameters.

    ```python
    ee.train.perturb({"lr": jnp.float32(0.1)}, key)  # {"lr": 0.08} or {"lr": 0.12}
    ```

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.
    """
    leaves, treedef = jax.tree.flatten(hyper)
    factors = jnp.where(jax.random.bernoulli(key, shape=(len(leaves),)), 1.2, 0.8)
    scaled = [x * f.astype(x.dtype) if eqx.is_inexact_array(x) else x for x, f in zip(leaves, factors, strict=True)]
    return jax.tree.unflatten(treedef, scaled)


def copy_members(state: TrainState[Any], donors: Any) -> TrainState[Any]:
    """The state in which every member is a copy of its donor `(members,)`, itself or another, and trains.

    Weights, optimiser states, hyperparameters and best weights are copied. Keys, also the noise keys of optimisers,
    and the number of steps stay the member's own: copies see other rows and other noise than their donor.
    """
    donors = np.asarray(donors)
    own = state[donors]
    opt_state = jax.tree_util.tree_map_with_path(
        lambda path, new, old: old if is_noise(path, old) else new, own.opt_state, state.opt_state
    )
    copied = donors != np.arange(len(donors))
    status = jnp.where(copied, jnp.int8(Status.OK), state.status)
    return dataclasses.replace(own, opt_state=opt_state, keys=state.keys, step=state.step, status=status)


def change_hyper(hyper: PyTree, members: Any, fn: Callable[[PyTree, Any], PyTree], keys: Any) -> PyTree:
    """The hyperparameters, changed for some members by `fn(hyper, key)`, one member after another."""
    leaves, treedef = jax.tree.flatten(hyper)
    arrays = [np.array(to_host(x)) for x in leaves]
    for i, key in zip(members, keys, strict=True):
        own = fn(jax.tree.unflatten(treedef, [x[i] for x in leaves]), key)
        for x, value in zip(arrays, treedef.flatten_up_to(own), strict=True):
            x[i] = value
    return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in arrays])


def revive(
    make: Callable[..., Any] | None = None,
    *,
    optimiser: Optimiser | None = None,
    perturb: Callable[[PyTree, Any], PyTree] | None = perturb,
) -> Callable[[TrainState[Any]], TrainState[Any] | None]:
    """A callback of [`eqx_ensemble.fit`][] that brings diverged members back, at the end of the epoch.

    **Arguments:**

    - `make`: a constructor of one member, as for [`eqx_ensemble.build`][], for a fresh initialisation with the
        member's key. By default the member becomes a copy of a random healthy one, with its hyperparameters.
    - `optimiser`: that of `fit`, required with `make`.
    - `perturb`: changes the hyperparameters of a member that is brought back, `perturb(hyper, key)`; `None` keeps
        them.

    **Returns:** a function of a training state.

    ```python
    callback = ee.train.revive()  # fit(..., callbacks=callback)
    ```
    """
    if make is not None and optimiser is None:
        raise TypeError("`revive` makes the optimiser's state of a fresh member: pass `optimiser=` with `make`.")

    def callback(state: TrainState[Any]) -> TrainState[Any] | None:
        status, step = to_host(state.status), to_host(state.step)
        lost, healthy = np.flatnonzero(status == Status.DIVERGED), np.flatnonzero(status == Status.OK)
        if not len(lost) or (make is None and not len(healthy)):
            return None
        fold = jax.vmap(lambda key, step: jax.random.fold_in(jax.random.fold_in(key, tag("revive")), step))
        keys = fold(state.keys[lost], jnp.asarray(step[lost]))
        donors = np.arange(len(status))
        if make is None:
            draw = jax.vmap(lambda key: jax.random.randint(key, (), 0, len(healthy)))
            donors[lost] = healthy[np.asarray(draw(keys))]
            new = copy_members(state, donors)
        else:
            new = put_fresh(state, lost, make, optimiser, keys)
        if perturb is None or state.hyper is None:
            return new
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        return dataclasses.replace(new, hyper=change_hyper(new.hyper, lost, perturb, keys))

    return callback


def put_fresh(
    state: TrainState[Any], lost: np.ndarray, make: Callable[..., Any], optimiser: Any, keys: Any
) -> TrainState[Any]:
    """The state with fresh members at the positions `lost`."""
    made = build(make, key=keys)
    fresh, *model_state = made if isinstance(made, tuple) else (made,)
    hyper = None if state.hyper is None else jax.tree.map(lambda x: x[lost], state.hyper)
    own = init(fresh, optimiser, state=model_state[0] if model_state else None, hyper=hyper, key=state.keys[lost])
    parts = lambda s: (s.params, s.opt_state, s.model_state, s.status)
    new = jax.tree.map(lambda x, y: x.at[lost].set(y) if eqx.is_array(x) else x, parts(state), parts(own))
    params, opt_state, model_state, status = new
    model = eqx.combine(params, state.ensemble.stacked)
    ensemble = eqx.tree_at(lambda e: e.stacked, state.ensemble, model)
    return dataclasses.replace(state, ensemble=ensemble, opt_state=opt_state, model_state=model_state, status=status)
