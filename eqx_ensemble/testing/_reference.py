import functools
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
from ._report import Check, distances, same, unlike


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


_REPEATS = 3
_MARGIN = 10  # one rounding may move training further than the largest of a few others
_CHAOS = 1e-2  # the relative effect of rounding on losses above which they are inconclusive


class Reference:
    """Every member trained alone, and the effect of rounding on each."""

    def __init__(self, members: list[Alone], batches: list) -> None:
        self._members, self._batches = members, batches
        self._expected = self._train_alone(None)

    def _train_alone(self, nudge: int | None) -> dict[str, PyTree]:
        trained = [member.train(self._batches, nudge=nudge) for member in self._members]
        return {"model": [one.model for one in trained], "losses": [one.losses for one in trained]}

    @functools.cached_property
    def _rounding_effects(self) -> dict[str, dict[str, float]]:
        """The effect of rounding on training alone, for every leaf of models and losses.

        A weight whose true gradient is zero (a bias in front of a normalisation, the bias of the keys of an attention)
        has rounding noise as its gradient, which Adam scales up to steps of full length. A line search may accept
        another point. No other training can be closer than these repetitions.
        """
        found: dict[str, dict[str, float]] = {part: {} for part in self._expected}
        for nudge in range(_REPEATS):
            for part, tree in self._train_alone(nudge).items():
                for path, distance in distances(tree, self._expected[part]).items():
                    found[part][path] = float(np.maximum(found[part].get(path, 0.0), distance))  # NaN stays
        return found

    def check(self, name: str, run: Any, rtol: float) -> Check:
        """Checks that the members of a run equal those trained alone."""
        models = run.ensemble.unstack()
        check = same(name, models, self._expected["model"], rtol)
        if check.problem is None or unlike(models, self._expected["model"]):
            return check
        again = same(name, self._train_alone(None), self._expected, rtol)
        if again.problem is not None:
            return Check(
                name,
                f"training alone is not the same twice, {again.problem}: does the loss draw without its key?",
            )
        largest = max(self._rounding_effects["losses"].values())
        if not largest <= _CHAOS:
            text = f"{check.problem}; this is inconclusive, because rounding alone changes the losses by {largest:.2g}"
            return Check(name, f"{text}: take fewer steps, or a larger `eps` of the optimiser")
        losses = list(np.asarray(run.history.loss))
        check = same(name, models, self._expected["model"], rtol, slack=self._slack("model"))
        if check.problem is not None:
            return check
        return same(name, losses, self._expected["losses"], rtol, slack=self._slack("losses"), noun="the losses ")

    def _slack(self, part: str) -> dict[str, float]:
        return {path: _MARGIN * moved for path, moved in self._rounding_effects[part].items()}
