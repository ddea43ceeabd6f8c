"""Shards of which no member trains, or none was validated, are those members of one `fit`."""

import dataclasses
import functools as ft

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .executors import Here
from .test_fit import KEY, MEMBERS, OPTIMISER, SEQUENTIAL, X, Y, assert_equal, fit, mse

PLAIN = {"batch_size": 8, "steps": 5, "plan": SEQUENTIAL, "key": KEY}
SGD = lambda hyper: optax.sgd(hyper["rate"])
VALIDATION = {"validation": (X[:9], Y[:9])}
IDLE = [2] * 3 + [100] * (MEMBERS - 3)  # the first shard stops after two steps
ROWS = np.tile(np.arange(20), (MEMBERS, 1))


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("rates", [[1e30] * 3 + [0.1] * 4, [0.1] * 4 + [1e30] * 3], ids=["first", "last"])
def test_a_shard_that_diverges_before_its_first_validation(rates):
    options = PLAIN | VALIDATION | {"optimiser": SGD, "hyper": {"rate": jnp.array(rates)}, "steps": 3}
    expected = fit(ee.fit, options)
    assert expected.history.validation.shape == (MEMBERS, 1)
    assert_equal(fit(ee.fleet.fit, options, Here(), shard=3), expected)


def train(call, begun, *args, **options):
    return call(*args, begun, mse, OPTIMISER, (X, Y), **(PLAIN | options))


@pytest.fixture(scope="module")
def stopped():
    return fit(ee.fit, PLAIN | {"stop": ee.train.Stopping(steps=np.array(IDLE)), "rows": ROWS})


@pytest.mark.parametrize(
    "options", [VALIDATION, {"rows": ROWS[:, :10]}, {"history": 2}], ids=["validation", "rows", "history"]
)
def test_a_shard_that_has_stopped(stopped, options):
    begun = dataclasses.replace(stopped, interrupted=True)
    found = train(ee.fleet.fit, begun, Here(), shard=3, **options)
    assert not found.interrupted
    assert_equal(found, train(ee.fit, begun, **options))


def test_a_shard_at_its_limit():
    begun, limits = fit(ee.fit, PLAIN), {"stop": ee.train.Stopping(steps=np.array([5] * 3 + [9] * 4))}
    assert_equal(train(ee.fleet.fit, begun, Here(), shard=3, **limits), train(ee.fit, begun, **limits))


def test_no_member_is_left(stopped, unhooked):
    for begun in (stopped, stopped.train_state):
        with pytest.raises(ValueError, match=f"all {MEMBERS} members have stopped"):
            train(ee.fleet.fit, begun, Here(), shard=3, stop=ee.train.Stopping(steps=5))
    with pytest.raises(ValueError, match="at least one member that trains; the members 0, 1, 2, a shard, have all"):
        train(ee.fleet.fit, stopped.train_state, Here(), shard=3)


@pytest.mark.filterwarnings("ignore:.*diverged")
def test_a_shard_that_diverged_is_revived():
    revive = {"on_diverge": ee.train.Revive(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key))}
    begun = fit(ee.fit, PLAIN | {"optimiser": SGD, "hyper": {"rate": jnp.array([1e30] * 3 + [0.1] * 4)}})
    call = lambda fit, *args, **more: fit(*args, begun, mse, SGD, (X, Y), **(PLAIN | revive | more))
    assert_equal(call(ee.fleet.fit, Here(), shard=3), call(ee.fit))


class Interrupted(Here):
    """Ctrl-C when the call of this number is submitted."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def submit(self, fn, /, *args):
        if len(self.calls) == self.number:
            raise KeyboardInterrupt
        return super().submit(fn, *args)


@pytest.mark.filterwarnings("ignore:.*interrupted")
def test_after_ctrl_c_members_are_at_one_step():
    """A rung that some did not begin has not taken place; a continued run trains those that were not dropped."""
    options = PLAIN | VALIDATION | {"optimiser": SGD, "hyper": {"rate": jnp.geomspace(1e-3, 0.1, MEMBERS)}, "steps": 3}
    workers = ft.partial(ee.fleet.fit, Interrupted(5), shard=2)
    run = fit(ee.methods.successive_halving, options, factor=1.4, fit=workers)
    steps = np.isfinite(run.history.loss).sum(axis=1)
    assert run.interrupted
    assert set(steps[run.status == ee.train.Status.OK]) == {3}
    again = ee.fit(run, mse, SGD, (X, Y), **(PLAIN | VALIDATION))
    trained = np.isfinite(again.history.loss).sum(axis=1)
    np.testing.assert_array_equal(trained - steps, np.where(run.status == ee.train.Status.OK, 5, 0))


def test_data_of_different_lengths():
    data = lambda ids: (X[: 37 if 0 in ids else 16], Y[: 37 if 0 in ids else 16])
    options = {"data": data, "epochs": 2, "plan": SEQUENTIAL}
    with pytest.warns(UserWarning, match="trained shards to different steps, as with data of different lengths"):
        run = fit(ee.fleet.fit, options, Here(), shard=4)
    assert run.status.tolist() == [0] * 4 + [1] * 3
    assert run.stopped_at.tolist() == [-1] * 4 + [4] * 3
