import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

import eqx_ensemble as ee

from ._data import make_windows
from ._model import Cell, Forecaster


def judge(forecaster: Forecaster, series: Float[Array, " time"]) -> dict[str, float]:
    """Scores of a forecaster, in the unit of the series."""
    windows, targets = make_windows(series, forecaster.num_steps)
    forecast = forecaster(windows)
    scores = ee.scores.crps_gaussian, ee.scores.nll_gaussian
    return {score.__name__: float(score(forecast.mean, forecast.variance, targets)) for score in scores}


def disagreement(
    ensemble: ee.Stacked[Cell, " members"], weights: Float[Array, " members"], windows: Float[Array, "rows steps"]
) -> Float[Array, " rows"]:
    """Variance of the members' means."""
    means = ee.predict(ensemble, windows)[..., 0]
    centred = means - (weights @ means)[None]
    return weights @ centred**2


def late_members(run: ee.Run[Cell]) -> Bool[Array, " members"]:
    """Which members were best at the last step of all."""
    best = jnp.asarray(run.best_step)
    return best == jnp.max(best)
