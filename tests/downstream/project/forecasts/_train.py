from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

import eqx_ensemble as ee

from ._data import make_windows
from ._model import Cell, Forecaster


def loss(
    model: Cell, batch: tuple[Float[Array, "rows steps"], Float[Array, " rows"]], key: PRNGKeyArray | None
) -> Float[Array, ""]:
    """Negative log-likelihood of one member, up to a constant."""
    windows, targets = batch
    mean, log_variance = jnp.moveaxis(jax.vmap(model)(windows), -1, 0)
    return 0.5 * jnp.mean(log_variance + (targets - mean) ** 2 * jnp.exp(-log_variance))


def make_optimiser(hyper: dict[str, Float[Array, ""]]) -> optax.GradientTransformation:
    """The optimiser of one member."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(hyper["rate"]))


def train(
    series: Float[Array, " time"],
    *,
    num_members: int = 3,
    num_steps: int = 6,
    hidden: int = 4,
    key: PRNGKeyArray,
    **options: Any,
) -> tuple[Forecaster, ee.Run[Cell]]:
    """Members on bootstraps of the windows, each with a learning rate of its own; `options` are those of `fit`."""
    offset, scale = jnp.mean(series), jnp.std(series)
    windows, targets = make_windows((series - offset) / scale, num_steps)
    count = windows.shape[0] * 3 // 4
    build_key, rows_key, fit_key = jax.random.split(key, 3)
    run = ee.fit(
        ee.build(lambda key: Cell(hidden, key=key), num_members, key=build_key),
        loss,
        make_optimiser,
        (windows[:count], targets[:count]),
        hyper={"rate": jnp.geomspace(3e-3, 3e-2, num_members)},
        rows=ee.resample.bootstrap(count, num_members, key=rows_key),
        validation=(windows[count:], targets[count:]),
        **({"epochs": 4, "batch_size": 16, "patience": 3} | options),
        key=fit_key,
    )
    return Forecaster(run.ensemble, jnp.zeros(num_members), offset, scale, num_steps), run


def fine_tune(forecaster: Forecaster, series: Float[Array, " time"], *, steps: int = 3) -> Forecaster:
    """Trains the weights of the members with a step of its own; the members stay as they are."""
    windows, targets = make_windows(series, forecaster.num_steps)
    where = lambda model: model.weights
    chosen = eqx.tree_at(where, jax.tree.map(lambda _: False, forecaster), replace=True)
    optimiser = optax.sgd(1.0)

    @eqx.filter_jit
    def step(model: Forecaster, state: Any) -> tuple[Forecaster, Any]:
        trained, rest = eqx.partition(model, chosen)

        @eqx.filter_grad
        def gradient(trained: Any) -> Float[Array, ""]:
            forecast = eqx.combine(trained, rest)(windows)
            return ee.scores.crps_gaussian(forecast.mean, forecast.variance, targets)

        updates, state = optimiser.update(gradient(trained), state)
        return eqx.apply_updates(model, updates), state

    state = optimiser.init(eqx.filter(forecaster, chosen))
    for _ in range(steps):
        forecaster, state = step(forecaster, state)
    return forecaster
