import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import eqx_ensemble as ee

from ._model import Cell
from ._train import loss

Batch = tuple[Float[Array, "rows steps"], Float[Array, " rows"]]


def outputs(model: Cell | ee.Ensemble[Cell], windows: Float[Array, "rows steps"]) -> Float[Array, "*members rows 2"]:
    """Mean and log variance of each row, of one model or of all members."""
    return model(ee.Batch(windows)) if isinstance(model, ee.Ensemble) else jax.vmap(model)(windows)


def train_members(
    ensemble: ee.Ensemble[Cell], optimiser: optax.GradientTransformation, batch: Batch, *, steps: int
) -> tuple[ee.Ensemble[Cell], Float[Array, " members"]]:
    """A training loop of its own, with the loss of every member before its last step."""

    @ee.map_members
    def init(model: Cell) -> optax.OptState:
        return optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    @ee.map_members
    def step(model: Cell, state: optax.OptState, batch: Batch) -> tuple[Cell, optax.OptState, Float[Array, ""]]:
        value, gradient = eqx.filter_value_and_grad(loss)(model, batch, None)
        update, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, update), state, value

    state, values = init(ensemble), jnp.zeros(ensemble.num_members)
    for _ in range(steps):
        ensemble, state, values = step(ensemble, state, batch)
    return ensemble, values


class StopBelow:
    """A callback that ends a run once all losses are below a limit; `seen` has the greatest loss at each call."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.seen: list[float] = []

    def __call__(self, state: ee.train.TrainState[Cell]) -> ee.train.TrainState[Cell] | None:
        self.seen.append(float(state.loss.max()))
        return state.stop() if self.seen[-1] < self.limit else None
