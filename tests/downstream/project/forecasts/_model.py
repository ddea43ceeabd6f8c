import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import eqx_ensemble as ee


class Cell(eqx.Module):
    """One member: mean and log variance of the value that follows a window."""

    gru: eqx.nn.GRUCell
    head: eqx.nn.Linear
    start: Float[Array, " hidden"]

    def __init__(self, hidden: int, *, key: PRNGKeyArray) -> None:
        first, second = jax.random.split(key)
        self.gru = eqx.nn.GRUCell(1, hidden, key=first)
        self.head = eqx.nn.Linear(hidden, 2, key=second)
        self.start = jnp.zeros(hidden)

    def __call__(self, window: Float[Array, " steps"]) -> Float[Array, "2"]:
        last, _ = jax.lax.scan(lambda carry, value: (self.gru(value[None], carry), None), self.start, window)
        return self.head(last)


class Forecast(eqx.Module):
    """A Gaussian for each row, in the unit of the series."""

    mean: Float[Array, " rows"]
    variance: Float[Array, " rows"]


class Forecaster(eqx.Module):
    """An ensemble as a field of a bigger model: its inputs and outputs are in the unit of the series."""

    ensemble: ee.Stacked[ee.Ensemble[Cell], " members"]
    weights: Float[Array, " members"]
    offset: Float[Array, ""]
    scale: Float[Array, ""]
    num_steps: int = eqx.field(static=True)

    def __call__(self, windows: Float[Array, "rows {self.num_steps}"]) -> Forecast:
        outputs = self.ensemble(ee.Batch((windows - self.offset) / self.scale))
        mean, variance = outputs[..., 0], jnp.exp(outputs[..., 1])
        combined = ee.combine.gaussian(mean, variance, weights=jax.nn.softmax(self.weights))
        return Forecast(self.offset + self.scale * combined.mean, self.scale**2 * combined.variance)
