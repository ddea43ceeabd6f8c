"""Errors that end a run: they keep their type, and carry the run so far."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same, grouped

KEY = jax.random.key(0)
MEMBERS = 3
ADAM = optax.adam(1e-2)
X = jax.random.normal(KEY, (20, 2))
Y = jnp.sin(X[:, 0])
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]
BAD = 3  # the batch that is wrong


def loss(model, batch, key):
    x, y = batch
    if x.shape[0] == 3:
        raise LookupError("three rows")
    value = jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)
    return eqx.error_if(value, jnp.any(x > 50), "a large input")


def fit(begun, data, **options):
    return ee.fit(begun, loss, ADAM, data, progress=False, key=KEY, **grouped(options))


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, key=KEY)


@pytest.mark.parametrize(
    ("plan", "scan", "batch_size"),
    [
        (ee.plan.Vmap(), True, 4),
        (ee.plan.Vmap(), True, 6),  # with a smaller last batch, in which it is raised
        (ee.plan.Vmap(), False, 6),
        (ee.plan.Sequential(), False, 4),
    ],
)
def test_of_a_program(ensemble, plan, scan, batch_size):
    """Every step before the one that raises is kept."""
    options = {"shuffle": False, "batch_size": batch_size, "plan": dataclasses.replace(plan, scan=scan)}
    bad = 14 if batch_size == 4 else 19
    with pytest.raises(RuntimeError, match="a large input") as caught:
        fit(ensemble, (X.at[bad, 0].set(60), Y), epochs=2, **options)
    assert type(caught.value).__name__ == "EquinoxRuntimeError"
    assert caught.value.__notes__ == ["`fit` ended after 3 steps; this error's `run` is the run so far."]
    short = fit(ensemble, (X, Y), steps=3, **options)
    assert_same(caught.value.run.train_state, short.train_state)
    assert_same(caught.value.run.history, short.history)
    assert caught.value.run.status.tolist() == [Status.OK] * MEMBERS


def test_of_a_program_far_into_a_run(ensemble):
    """After chunks that went well, and in a state that only a later epoch reaches."""

    def late(model, batch, key, hyper):
        return eqx.error_if(loss(model, batch, key), model.weight[0, 0] > hyper, "too large")

    options = {"shuffle": False, "batch_size": 4, "progress": False, "key": KEY}
    fit = lambda hyper, **more: ee.fit(ensemble, late, optax.sgd(1e-2), (X, Y), hyper=hyper, **options, **more)
    free = fit(jnp.full(MEMBERS, 100.0), steps=200)
    grown = free.ensemble.stacked.weight[:, 0, 0] - ensemble.stacked.weight[:, 0, 0]
    member = int(jnp.argmax(grown))
    assert grown[member] > 0
    bound = ensemble.stacked.weight[member, 0, 0] + 0.9 * grown[member]
    with pytest.raises(RuntimeError, match="too large") as caught:
        fit(jnp.full(MEMBERS, 100.0).at[member].set(bound), steps=200)
    run = caught.value.run
    assert 32 < run.train_state.step < 200
    assert run.ensemble.stacked.weight[member, 0, 0] > bound  # with which the next step would begin
    np.testing.assert_array_equal(run.history.loss, free.history.loss[:, : int(run.train_state.step)])


@pytest.mark.parametrize("scan", [True, False])
def test_errors_that_give_nan_are_one_members(ensemble, scan):
    """Under `Sequential`: under `vmap`, Equinox gives NaN to all."""

    def solver(model, batch, key, hyper):
        return eqx.error_if(loss(model, batch, key), hyper == 1, "no convergence", on_error="nan")

    options = {"hyper": jnp.arange(MEMBERS), "plan": ee.plan.Sequential(scan=scan), "batch_size": 4, "steps": 3}
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(ensemble, solver, ADAM, (X, Y), progress=False, key=KEY, **options)
    assert run.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK]


class OwnError(Exception):
    """A user's own."""


def _raising():
    yield from BATCHES[:BAD]
    raise OwnError("the disk is gone")


def _with(batch):
    return lambda: [*BATCHES[:BAD], batch, *BATCHES[BAD + 1 :]]


WRONG = {
    "raises": (_raising, OwnError, "the disk is gone"),
    "spent": (lambda: iter(BATCHES[:BAD]), ValueError, "no batches in epoch 2"),
    "None": (_with(None), TypeError, "at least one array in `batch`, got `None`"),
    "no rows": (_with((X[:0], Y[:0])), ValueError, "needs at least one row in `batch`, got none"),
    "lengths": (_with((X[:4], Y[:3])), ValueError, "needs arrays of one length"),
    "a list": (_with(([1.0], [2.0])), TypeError, "needs arrays in its data"),
    "another shape": (_with((X[:3], Y[:3])), LookupError, "three rows"),
    "at run time": (_with((X[:4] + 60, Y[:4])), RuntimeError, "a large input"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_of_data(ensemble, kind):
    make, error, message = WRONG[kind]
    with pytest.raises(error, match=message) as caught:
        fit(ensemble, make(), steps=10, validation=(X, Y))
    run, short = caught.value.run, fit(ensemble, BATCHES, steps=BAD, validation=(X, Y))
    assert_same(run.train_state, short.train_state)
    assert_same(run.history.loss, short.history.loss)
    whole = fit(ensemble, BATCHES, steps=5, validation=(X, Y))
    assert_same(fit(run, BATCHES[BAD:], steps=2, validation=(X, Y)).train_state, whole.train_state)


def test_the_same_call_resumes(ensemble, tmp_path):
    """What was reached is saved, so that a call with the data mended repeats nothing."""
    options = {"steps": 5, "checkpoint": tmp_path / "run"}
    with pytest.raises(OwnError) as caught:
        fit(ensemble, _raising(), **options)
    assert caught.value.__notes__[0].endswith("Rerunning the same call resumes there.")
    assert ee.contents(tmp_path / "run").meta["fit"]["step"] == BAD
    assert_same(fit(ensemble, BATCHES, **options).train_state, fit(ensemble, BATCHES, steps=5).train_state)


class Live:
    """Batches whose `get_state` returns the live state, which the next batch takes further; one `fails` for once."""

    def __init__(self, fails=None):
        self._state, self._fails = {"place": 0}, fails

    def __iter__(self):
        return self

    def __next__(self):
        place, self._state["place"] = self._state["place"], self._state["place"] + 1
        if place == self._fails:
            raise OwnError
        return BATCHES[place]

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


@pytest.mark.parametrize("saved", [False, True])
def test_a_live_state_is_that_of_the_last_step(ensemble, tmp_path, saved):
    """The next batch has been asked for when a step is noted: none is skipped, none is seen twice."""
    options = {"checkpoint": tmp_path / "run"} if saved else {}
    with pytest.raises(OwnError) as caught:
        fit(ensemble, Live(fails=BAD), steps=5, **options)
    run, whole = caught.value.run, fit(ensemble, BATCHES, steps=5)
    assert run.data_state == {"place": BAD}
    for _ in range(2):  # continuing a run does not change it
        again = fit(ensemble, Live(), steps=5, **options) if saved else fit(run, Live(), steps=2)
        assert_same(again.train_state, whole.train_state)
    assert run.data_state == {"place": BAD}


@pytest.mark.parametrize("data", [(X.at[0, 0].set(60), Y), [(X[:3], Y[:3])], [None]], ids=["run time", "shape", "None"])
def test_before_the_first_step_there_is_none(ensemble, data):
    with pytest.raises(Exception, match=r"large input|three rows|got `None`") as caught:
        fit(ensemble, data, steps=2, **({"shuffle": False} if isinstance(data, tuple) else {}))
    assert not hasattr(caught.value, "run")


class TestIterators:
    def test_are_refused_for_several_epochs(self, ensemble):
        """Before the first batch is drawn."""
        for source in (iter(BATCHES), (batch for batch in BATCHES), map(tuple, BATCHES)):
            with pytest.raises(ValueError, match=re.escape("`epochs=2` got")):
                fit(ensemble, source, epochs=2)
            assert len(list(source)) == len(BATCHES)

    def test_of_ones_own(self, ensemble):
        class Once:
            def __init__(self):
                self.batches = iter(BATCHES)

            def __iter__(self):
                """A docstring names nothing."""
                return self

            def __next__(self):
                return next(self.batches)

        class Again(Once):
            def __iter__(self):
                self.batches = iter(BATCHES)
                return self

        with pytest.raises(ValueError, match="`epochs=2` got"):
            fit(ensemble, Once(), epochs=2)
        whole = fit(ensemble, BATCHES, epochs=2)
        assert_same(fit(ensemble, Again(), epochs=2).train_state, whole.train_state)
        assert_close(fit(ensemble, Once(), epochs=1).ensemble, fit(ensemble, BATCHES, epochs=1).ensemble, 1e-6)


def test_another_min_delta_compiles_nothing(ensemble, compiled):
    options = {"epochs": 2, "validation": (X, Y), "patience": 2, "batch_size": 4}
    fit(ensemble, (X, Y), min_delta=0.1, **options)
    with compiled() as names:
        fit(ensemble, (X, Y), min_delta=0.2, smooth=0.5, **options)
    assert names == []
