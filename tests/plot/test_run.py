"""Plots of a real run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status


@pytest.fixture(scope="module")
def run():
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = (x, np.sin(x[:, :1]))
    key = jax.random.key(0)
    hyper = {"lr": jnp.array([1e-3, 1e-2, 1e-1, 1e38])}
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    options = {"hyper": hyper, "epochs": 6, "batch_size": 10, "validation": data, "key": key}
    with pytest.warns(UserWarning, match="members 3 diverged"):
        return ee.fit(ensemble, loss, lambda hyper: optax.sgd(hyper["lr"]), data, **options)


def test_dots_are_where_weights_were_kept(ax, run):
    assert run.status[3] == Status.DIVERGED
    assert ee.plot.training_curves(run, curve="validation", ax=ax) is ax
    dots = ax.lines[-1]
    assert dots.get_linestyle() == "None"
    kept = run.best_step > 0
    np.testing.assert_array_equal(dots.get_xdata(), run.best_step[kept])
    np.testing.assert_array_equal(dots.get_ydata(), run.best_score[kept])
    for step, score, member in zip(*dots.get_data(), np.flatnonzero(kept), strict=True):
        at = run.history.validation_step.tolist().index(step)
        assert run.history.validation[member, at] == score


def test_a_run_is_its_history(run):
    ax, other = ee.plot.training_curves(run), ee.plot.training_curves(run.history)
    *lines, mark = ax.lines
    for line, same in zip(lines, other.lines, strict=True):
        np.testing.assert_array_equal(line.get_xydata(), same.get_xydata())
    assert mark.get_label() == "1 diverged"  # which a history does not tell
