"""Errors that hold a run can be sent to other processes, and `jax_debug_nans` ends no training."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import DivergedError, NotSavedError, Status

from ..factories import grouped

KEY = jax.random.key(0)
ROWS = (jnp.linspace(-1, 1, 8)[:, None], jnp.ones((8, 1)))
RATES = {"lr": jnp.asarray([0.1, 1e30, 0.2])}


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def sgd(hyper):
    return optax.sgd(hyper["lr"])


def linear(key):
    return eqx.nn.Linear(1, 1, key=key)


def with_lambda(key):
    return eqx.nn.MLP(1, 1, 4, 1, key=key)


def errors_of(make):
    ensemble = ee.build(make, 3, key=KEY)
    with pytest.raises(DivergedError) as found:
        ee.fit(ensemble, loss, sgd, ROWS, hyper=RATES, steps=8, on_diverge="raise", key=KEY)
    return found.value, NotSavedError(OSError(28, "No space left on device"), found.value.run)


@pytest.mark.parametrize("send", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_errors_arrive_with_their_run(send):
    for error in errors_of(linear):
        error.add_note("a note")
        arrived = send(error)
        assert type(arrived) is type(error)
        assert (str(arrived), arrived.args, arrived.__notes__) == (str(error), error.args, ["a note"])
        assert getattr(arrived, "errno", None) == getattr(error, "errno", None)
        assert arrived.run.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK]
        np.testing.assert_array_equal(arrived.run.ensemble.stacked.weight, error.run.ensemble.stacked.weight)


def test_errors_arrive_without_a_run_that_cannot():
    """`equinox.nn.MLP` holds a lambda: an error that could not be pickled would hang some pools of processes."""
    for error in errors_of(with_lambda):
        arrived = pickle.loads(pickle.dumps(error))
        assert str(arrived) == str(error)
        assert arrived.run is None
        assert "cannot be pickled" in arrived.__notes__[-1]
        assert error.run is not None
        assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("limits", [{"stop": ee.train.Stopping(steps=[3, 8, 5])}, {"patience": 1, "min_delta": 100.0}])
def test_debug_nans_ends_nothing(limits):
    """Members that stop, at steps of their own; the third diverges."""
    ensemble = ee.build(linear, 3, key=KEY)
    options = {"validation": ROWS, "epochs": 4, "batch_size": 4, "key": KEY} | limits
    rates = {"lr": RATES["lr"][jnp.array([0, 2, 1])]}
    fitted = lambda: ee.fit(ensemble, loss, sgd, ROWS, hyper=rates, **grouped(options))
    with pytest.warns(UserWarning, match="diverged"):
        expected = fitted()
    with jax.debug_nans(True), jax.debug_infs(True), pytest.warns(UserWarning, match="diverged"):
        run = fitted()
    assert run.stopped_at.tolist() == expected.stopped_at.tolist()
    np.testing.assert_array_equal(run.history.loss, expected.history.loss)
    np.testing.assert_array_equal(run.best_score, expected.best_score)


def test_debug_nans_in_a_loop_of_ones_own():
    ensemble = ee.build(linear, 3, key=KEY)
    state = ee.train.init(ensemble, sgd, hyper=RATES, key=KEY)
    step = ee.train.make_step(loss, sgd)
    with jax.debug_nans(True):
        for _ in range(8):
            state, metrics = step(state, ROWS)
        with pytest.raises(FloatingPointError):  # which still guards what is the user's own
            jnp.log(-jnp.ones(())).block_until_ready()
    assert metrics.status.tolist() == [0, 2, 0]
    assert np.isnan(metrics.loss).tolist() == [False, True, False]
