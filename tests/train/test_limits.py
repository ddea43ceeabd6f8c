"""Members that stop at limits: step and time budgets, target scores."""

import contextlib
import itertools
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import assert_close

KEY = jax.random.key(0)
ADAM = optax.adam(1e-2)
MEMBERS = 5


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def data(rows):
    x = jax.random.normal(KEY, (rows, 3))
    return x, jnp.sin(x[:, 0])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def fitted(ensemble, rows=40, **options):
    options = {"data": data(rows), "epochs": 6} | ({} if "data" in options else {"batch_size": 8}) | options
    return ee.fit(ensemble, loss, ADAM, progress=False, key=KEY, **options)


@pytest.mark.parametrize("rows", [40, 43])
@pytest.mark.parametrize("with_validation", [False, True])
def test_each_member_stops_at_its_own_step(ensemble, rows, with_validation):
    """Also on the step before an epoch's smaller last batch, on that, and after the last; weights are those of then."""
    options = {"validation": data(16)} if with_validation else {}
    limits = np.array([3, 5, 6, 17, 1000])
    run = fitted(ensemble, rows, stop=ee.train.Stopping(steps=limits), **options)
    total = 6 * -(-rows // 8)
    assert run.stopped_at.tolist() == [3, 5, 6, 17, -1]
    assert run.status.tolist() == [Status.STOPPED] * 4 + [Status.OK]
    last = run.train_state.ensemble
    for member, limit in enumerate(limits.clip(max=total)):
        short = fitted(ensemble, rows, epochs=None, steps=int(limit), **options)
        assert_close(last[[member]], short.train_state.ensemble[[member]], 1e-6)  # a program of another length
        assert np.isfinite(run.history.loss[member]).sum() == limit
        if with_validation:  # also of its last weights, wherever in an epoch it stopped
            assert_close(run.ensemble[[member]], short.ensemble[[member]], 1e-6)
            assert run.best_step[member] == short.best_step[member]
            scores = [loss(tree[member], data(16), None) for tree in (short.ensemble, last)]
            np.testing.assert_allclose(run.best_score[member], scores[0], rtol=1e-5)
            assert np.isclose(run.history.validation[member], scores[1], rtol=1e-5).any()


def test_in_batches_of_ones_own(ensemble):
    x, y = data(40)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    run = ee.fit(
        ensemble, loss, ADAM, batches, epochs=2, stop=ee.train.Stopping(steps=[1, 2, 3, 4, 50]), progress=False, key=KEY
    )
    assert run.stopped_at.tolist() == [1, 2, 3, 4, -1]


def test_weights_of_members_that_leave_the_arrays_are_validated(ensemble, monkeypatch):
    """Members go as soon as they stop, before the epoch ends; over batches whose pass never ends, too."""
    pays = "eqx_ensemble.train.host._loop.Pacing.pays"
    monkeypatch.setattr(pays, lambda self, width, before, steps_left: width < before)
    monkeypatch.setattr("eqx_ensemble.train.host._active._FEWEST", 1)
    x, y = data(40)
    endless = itertools.cycle([(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)])
    for source in ({}, {"data": endless}):
        fit = lambda **options: fitted(ensemble, validation=data(16), epochs=None, **source, **options)  # noqa: B023
        run = fit(steps=14, stop=ee.train.Stopping(steps=[3, 3, 3, 7, 100]))
        assert run.stopped_at.tolist() == [3, 3, 3, 7, -1]
        for member in range(MEMBERS):
            of_last = loss(run.train_state.ensemble[member], data(16), None)
            assert np.isclose(run.history.validation[member], of_last, rtol=1e-5).any()
            np.testing.assert_allclose(run.best_score[member], np.nanmin(run.history.validation[member]))


def test_the_last_members_stop_within_an_epoch(ensemble):
    run = fitted(ensemble, validation=data(16), stop=ee.train.Stopping(steps=[3, 7, 7, 6, 2]))
    assert run.history.loss.shape == (MEMBERS, 7)
    assert run.history.validation_step.tolist() == [5, 7]
    assert np.isfinite(run.history.validation).sum(axis=1).tolist() == [1, 2, 2, 2, 1]
    for member in range(MEMBERS):
        scores = run.history.validation[member]
        of_last = loss(run.train_state.ensemble[member], data(16), None)
        np.testing.assert_allclose(scores[np.isfinite(scores)][-1], of_last, rtol=1e-5)


def test_one_budget_for_all_ends_the_run(ensemble):
    run = fitted(ensemble, stop=ee.train.Stopping(steps=12))
    assert run.stopped_at.tolist() == [12] * MEMBERS
    assert run.history.loss.shape == (MEMBERS, 12)
    assert run.train_state.step == 12  # though the chunk was longer


def test_a_target_is_each_members_own(ensemble):
    free = fitted(ensemble, validation=data(64), epochs=30)
    scores = free.history.validation
    targets = np.array([scores[i, epoch] for i, epoch in enumerate((3, 0, 29, 10, 5))])
    run = fitted(ensemble, validation=data(64), epochs=30, stop=ee.train.Stopping(target=targets.astype(np.float32)))
    first = np.argmax(scores <= targets[:, None], axis=1)  # the first epoch at which each reaches its own
    assert run.stopped_at.tolist() == ((first + 1) * 5).tolist()
    assert (run.status == Status.STOPPED).all()
    assert np.all(run.best_score <= targets)


def test_time_is_over(ensemble, monkeypatch):
    ticks = itertools.count(step=0.5)
    monkeypatch.setattr("eqx_ensemble.train.host._loop.time.perf_counter", lambda: next(ticks))
    run = fitted(ensemble, epochs=10**7, stop=ee.train.Stopping(seconds=[2.0, 2.0, 2.0, 2.0, 8.0]))
    assert (run.status == Status.STOPPED).all()
    assert run.stopped_at[:4].tolist() == [run.stopped_at[0]] * 4
    assert 0 < run.stopped_at[0] < run.stopped_at[4] < 10**5


def test_time_stops_no_member_before_its_first_step(ensemble):
    """Also where one fails in the first chunk, whose steps are then run again in parts."""
    fails = lambda model, batch, key, hyper: loss(model, batch, key) + jnp.where(hyper == 1, jnp.nan, 0.0)
    options = {
        "hyper": jnp.array([0, 1, 0, 0, 0]),
        "stop": ee.train.Stopping(seconds=1e-9),
        "steps": 8,
        "progress": False,
        "key": KEY,
    }
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(ensemble, fails, ADAM, data(40), batch_size=8, **options)
    assert run.status.tolist() == [Status.STOPPED, Status.DIVERGED, *[Status.STOPPED] * 3]
    assert (run.stopped_at[[0, 2, 3, 4]] > 0).all()


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stop": ee.train.Stopping(target=0.1)},
            "`fit` needs `validation=` data with `target`: a member stops when its score reaches it.",
        ),
        (
            {"stop": ee.train.Stopping(steps=[1, 2])},
            "`fit` needs one `steps` per member in `stop`: expected (5,), got (2,).",
        ),
        ({"stop": 100}, "`fit` needs `stop` to be a `train.Stopping`, got"),
    ],
)
def test_mistakes(ensemble, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        fitted(ensemble, **options)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1.5}, "`train.Stopping` needs `steps` to be an integer, or one per member `(members,)`, got 1.5."),
        ({"steps": 0}, "`train.Stopping` needs `steps` to be positive, got 0."),
        ({"steps": 2**40}, "`train.Stopping` needs `steps` of at most"),
        ({"target": np.nan}, "`train.Stopping` needs `target` to be finite, got nan."),
        ({"seconds": -1}, "`train.Stopping` needs `seconds` to be positive, got -1."),
        ({"seconds": "1 h"}, "`train.Stopping` needs `seconds` to be a number, or one per member"),
    ],
)
def test_mistakes_in_limits(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ee.train.Stopping(**options)


class TestPredictionsOfARun:
    def run(self, faulty=(1, 3)):
        ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)
        optimiser = lambda h: optax.sgd(h["lr"])
        lr = jnp.full(MEMBERS, 1e-2).at[jnp.array(faulty, int)].set(jnp.inf)
        with pytest.warns(UserWarning, match="diverged") if faulty else contextlib.nullcontext():
            return ee.fit(ensemble, loss, optimiser, data(16), epochs=1, hyper={"lr": lr}, progress=False, key=KEY)

    def test_the_dead_are_left_out_by_name(self):
        run, (x, _) = self.run(), data(10)
        with pytest.warns(UserWarning, match=r"`Run.predict` excludes 2 member\(s\) that diverged: 1, 3\."):
            out = run.predict(x)
        np.testing.assert_array_equal(out, ee.predict(run.ensemble, x)[np.array([0, 2, 4])])
        assert run.fault.tolist() == ["", ".layers[0].weight", "", ".layers[0].weight", ""]

    def test_weights_of_rows_are_for_predict(self):
        run, (x, _) = self.run(faulty=()), data(10)
        with pytest.raises(ValueError, match=r"expected shape \(5,\), got \(5, 10\).\n.*`ee.predict\(run.ensemble"):
            run.predict(x, combine=ee.combine.mean, weights=np.ones((5, 10)))

    def test_weights_are_renormalised(self):
        run, (x, _) = self.run(), data(10)
        weights = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
        with pytest.warns(UserWarning, match="excludes"):
            out = run.predict(x, combine=ee.combine.mean, weights=weights)
        each = np.asarray(ee.predict(run.ensemble, x))
        np.testing.assert_allclose(out, (0.1 * each[0] + 0.2 * each[2] + 0.1 * each[4]) / 0.4, rtol=1e-5)

    def test_strict_raises(self):
        run, (x, _) = self.run(), data(10)
        with pytest.raises(ee.train.DivergedError, match="excludes 2") as caught:
            run.predict(x, strict=True)
        assert caught.value.run is run

    def test_all_are_dead(self):
        run, (x, _) = self.run(range(MEMBERS)), data(10)
        with pytest.raises(ee.train.DivergedError, match="all 5 members diverged"):
            run.predict(x)

    def test_no_member_is_dead(self):
        run, (x, _) = self.run(()), data(10)
        np.testing.assert_array_equal(run.predict(x), ee.predict(run.ensemble, x))
        with pytest.raises(TypeError, match="needs `combine=` with `weights`"):
            run.predict(x, weights=np.ones(MEMBERS))


@pytest.mark.slow
def test_a_warning_of_excluded_members_is_at_the_users_line(tmp_path):
    """Without the hook of type checks, which calls functions through more frames."""
    program = tmp_path / "program.py"
    program.write_text(
        "import jax, jax.numpy as jnp, equinox as eqx, optax\n"
        "import eqx_ensemble as ee\n"
        "make = lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key)\n"
        "loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch)) ** 2\n"
        "hyper = {'lr': jnp.array([0.1, jnp.inf])}\n"
        "sgd = lambda hyper: optax.sgd(hyper['lr'])\n"
        "ensemble, x = ee.build(make, 2, key=jax.random.key(0)), jnp.ones((4, 2))\n"
        "rows = jnp.array([[0, 1], [2, 3]])\n"
        "run = ee.fit(ensemble, loss, sgd, x, rows=rows, hyper=hyper, steps=1, key=jax.random.key(0))\n"
        "run.predict(x)\n"
        "run.out_of_bag(x)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert f"{program}:10: UserWarning: `Run.predict` excludes" in done.stderr
    assert f"{program}:11: UserWarning: `Run.out_of_bag` excludes" in done.stderr
