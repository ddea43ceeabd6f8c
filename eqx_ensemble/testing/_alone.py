from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._promotion import standard_promotion
from .._pytree import PyTree
from ..train.compiled._check import check_loss_signature
from ..train.compiled._optimiser import Optimiser, init_member, resolve


class Trained(NamedTuple):
    """A model after training, and its losses `(steps,)`."""

    model: Any
    losses: np.ndarray


class Alone:
    """One member, trained without this library: `equinox.filter_jit`, optax and a loop."""

    def __init__(
        self,
        model: Any,
        state: Any,
        hyper: Any,
        key: Any,
        *,
        loss: Callable[..., Any],
        optimiser: Optimiser,
        member: int,
    ) -> None:
        self._params, self._frozen = eqx.partition(model, eqx.is_inexact_array)
        self._opt_state = init_member(optimiser, self._params, hyper, jnp.int32(member))  # its own noise keys
        self._state, self._key = state, key
        transformation = optax.with_extra_args_support(resolve(optimiser, hyper))
        stateful = state is not None
        named = {"hyper": hyper} if check_loss_signature(loss, stateful=stateful, hyper=hyper, name="fit") else {}

        def value(params: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
            model = eqx.combine(params, self._frozen)
            return loss(model, state, batch, key, **named) if stateful else (loss(model, batch, key, **named), None)

        @eqx.filter_jit
        def step(params: Any, opt_state: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any, Any]:
            (now, new), grads = jax.value_and_grad(value, has_aux=True)(params, state, batch, key)
            value_fn = lambda params: value(params, state, batch, key)[0]
            with standard_promotion():
                updates, opt_state = transformation.update(
                    grads, opt_state, params, value=now, grad=grads, value_fn=value_fn
                )
                return optax.apply_updates(params, updates), opt_state, new, now

        self._step = step

    def train(self, batches: list, *, nudge: int | None = None) -> Trained:
        """Trains the member; `nudge` seeds a random change of all weights by one rounding before every step."""
        params, opt_state, state, losses = self._params, self._opt_state, self._state, []
        for i, batch in enumerate(batches):
            if nudge is not None:
                params = _perturb(params, jax.random.fold_in(jax.random.key(nudge), i))
            params, opt_state, state, value = self._step(
                params, opt_state, state, batch, jax.random.fold_in(self._key, i)
            )
            losses.append(value)
        return Trained(eqx.combine(params, self._frozen), np.asarray(jnp.stack(losses)))


@eqx.filter_jit
def _perturb(params: PyTree, key: Any) -> PyTree:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, max(len(leaves), 1))
    perturbed = [
        x * (1 + float(jnp.finfo(x.dtype).eps) * jax.random.rademacher(k, x.shape, x.dtype))
        for x, k in zip(leaves, keys[: len(leaves)], strict=True)
    ]
    return jax.tree.unflatten(treedef, perturbed)
