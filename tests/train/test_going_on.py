"""Runs that continue another run, a training state or a user's loop."""

import functools as ft
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Revive, Status

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
MEMBERS = 4
ADAM = optax.adam(1e-2)


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)  # so that a stream that started again would be seen
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def data(rows):
    x = jax.random.normal(KEY, (rows, 3))
    return x, jnp.sin(x[:, 0])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


def fitted(begun, rows=40, **options):
    return ee.fit(begun, loss, ADAM, data(rows), **({"batch_size": 8, "progress": False, "key": KEY} | options))


def assert_same_run(run, whole):
    assert_same(run.ensemble, whole.ensemble)
    assert_same(run.train_state, whole.train_state)
    assert_same(run.selection, whole.selection)
    assert_same(run.history, whole.history)
    assert run.status.tolist() == whole.status.tolist()
    assert run.stopped_at.tolist() == whole.stopped_at.tolist()


class TestAsIfItHadNotStopped:
    @pytest.mark.parametrize("shuffle", [True, "shared", False])
    @pytest.mark.parametrize("rows", [40, 43])
    def test_after_whole_epochs(self, ensemble, rows, shuffle):
        whole = fitted(ensemble, rows, shuffle=shuffle, epochs=5)
        run = fitted(fitted(ensemble, rows, shuffle=shuffle, epochs=2), rows, shuffle=shuffle, epochs=3)
        assert_same_run(run, whole)

    @pytest.mark.parametrize("rows", [40, 43])
    def test_after_any_step(self, ensemble, rows):
        """Also where only an epoch's smaller last batch is left."""
        per_epoch = -(-rows // 8)
        whole = fitted(ensemble, rows, epochs=3)
        cuts = [0, 1, per_epoch - 1, per_epoch, 2 * per_epoch - 2, 3 * per_epoch]
        run = ensemble
        for start, stop in itertools.pairwise(cuts):
            run = fitted(run, rows, steps=stop - start)
        assert_same_run(run, whole)

    def test_with_validation_and_patience(self, ensemble):
        options = {"validation": ee.train.Validation(data(16), min_delta=0.02), "patience": 2}
        whole = fitted(ensemble, epochs=12, **options)
        assert len(set(whole.stopped_at.tolist())) > 1
        run = fitted(fitted(ensemble, epochs=3, **options), epochs=9, **options)
        assert_same_run(run, whole)
        assert run.best_step.tolist() == whole.best_step.tolist()

    def test_members_stop_at_steps_of_all_runs(self, ensemble):
        limits = [2, 7, 12, 100]
        whole = fitted(ensemble, epochs=4, stop=ee.train.Stopping(steps=limits))
        run = fitted(
            fitted(ensemble, epochs=2, stop=ee.train.Stopping(steps=limits)),
            epochs=2,
            stop=ee.train.Stopping(steps=limits),
        )
        assert_same_run(run, whole)
        assert run.stopped_at.tolist() == [2, 7, 12, -1]

    def test_with_hyper_parameters_and_revivals(self, ensemble):
        def faulty(model, batch, key, hyper):
            return jnp.where(hyper["lr"] > 0.5, jnp.nan, loss(model, batch, key))

        optimiser = lambda hyper: optax.adam(hyper["lr"])
        how = Revive(perturb=lambda hyper, key: hyper | {"lr": 0.7 + jax.random.uniform(key) * 0.1}, most=2)
        options = {"on_diverge": how, "batch_size": 8, "progress": False, "key": KEY}
        fit = lambda begun, **more: ee.fit(begun, faulty, optimiser, data(40), **options, **more)
        with pytest.warns(UserWarning, match="diverged"):
            run = fit(ensemble, epochs=1, hyper={"lr": jnp.array([0.1, 0.9, 0.1, 0.1])})
        assert len(run.revived) == 2
        with pytest.warns(UserWarning, match="diverged"):
            again = fit(run, epochs=1)
        assert again.revived == run.revived  # it was revived as often as allowed
        assert again.history.loss.shape == (MEMBERS, 10)

    def test_over_batches_of_ones_own(self, ensemble):
        x, y = data(40)
        batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
        fit = lambda begun, **more: ee.fit(begun, loss, ADAM, batches, progress=False, key=KEY, **more)
        whole = fit(ensemble, steps=15)
        assert_same_run(fit(fit(ensemble, epochs=1), steps=10), whole)

    def test_under_other_plans(self, ensemble):
        for plan in (ee.plan.Chunked(2), ee.plan.Sequential()):
            whole = fitted(ensemble, epochs=2, plan=plan)
            assert_same_run(fitted(fitted(ensemble, steps=3, plan=plan), steps=7, plan=plan), whole)

    def test_what_it_started_from_stays(self, ensemble):
        run = fitted(ensemble, epochs=1, validation=data(16))
        before = jax.tree.map(np.array, (run.train_state.moving, run.selection, run.history))
        fitted(run, epochs=1, validation=data(16))
        assert_same((run.train_state.moving, run.selection, run.history), before)


class TestFromATrainingState:
    def test_of_ones_own_loop(self, ensemble):
        step, state = ee.train.make_step(loss, ADAM), ee.train.init(ensemble, ADAM, key=KEY)
        x, y = data(40)
        for i in range(0, 40, 8):
            state, _ = step(state, (x[i : i + 8], y[i : i + 8]))
        run = fitted(state, shuffle=False, epochs=1)
        whole = fitted(ensemble, shuffle=False, epochs=2)
        assert_close(run.ensemble, whole.ensemble, 1e-6)  # a step per call is another program than a loop of steps
        np.testing.assert_allclose(run.history.loss, whole.history.loss[:, 5:], rtol=1e-5)

    def test_its_history_is_its_own(self, ensemble):
        state = fitted(ensemble, epochs=2, validation=data(16)).train_state
        run = fitted(state, epochs=2, validation=data(16))
        assert run.history.loss.shape == (MEMBERS, 10)
        assert run.history.validation_step.tolist() == [15, 20]
        assert (run.best_step > 10).all()

    def test_changed_hyper_parameters(self, ensemble):
        optimiser = lambda hyper: optax.sgd(hyper)
        run = ee.fit(ensemble, loss, optimiser, data(40), hyper=jnp.full(MEMBERS, 0.1), epochs=1, key=KEY)
        state = eqx.tree_at(lambda s: s.hyper, run.train_state, jnp.zeros(MEMBERS))
        assert_same(ee.fit(state, loss, optimiser, data(40), epochs=1, key=KEY).ensemble, run.ensemble)


def test_a_budget_that_is_over_is_not_exceeded(ensemble):
    run = fitted(fitted(ensemble, epochs=2), steps=10, stop=ee.train.Stopping(steps=[5, 5, 100, 100]))
    assert run.stopped_at.tolist() == [10, 10, -1, -1]


def test_an_old_fault_is_not_raised_again(ensemble):
    faulty = lambda model, batch, key, hyper: jnp.where(hyper == 1, jnp.nan, loss(model, batch, key))
    options = {"on_diverge": "raise", "batch_size": 8, "progress": False, "key": KEY}
    with pytest.raises(ee.train.DivergedError) as caught:
        ee.fit(ensemble, faulty, ADAM, data(40), hyper=jnp.arange(MEMBERS), epochs=2, **options)
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(caught.value.run, faulty, ADAM, data(40), epochs=1, **options)
    assert run.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK, Status.OK]


def test_patience_counts_epochs_that_end(ensemble):
    options = {"validation": data(16), "patience": 50}
    run = fitted(fitted(ensemble, steps=5, **options), steps=4, validation=data(16))
    with pytest.raises(ValueError, match="end within an epoch of 5"):
        fitted(ensemble, steps=4, **options)
    assert fitted(run, steps=2, **options).train_state.step == 11


def plain_score(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


class TestAnotherValidation:
    """The best weights of the first run compete by their own score on what the second run validates."""

    @pytest.mark.parametrize("factor", [1, 100], ids=["other data", "another score"])
    def test_best_weights_are_scored_again(self, ensemble, factor):
        x, y = data(24)
        score = lambda model, batch, key: factor * plain_score(model, batch, key)
        options, judged = {"epochs": 2, "patience": 9}, ft.partial(ee.train.Validation, mode="min")
        first = fitted(ensemble, validation=judged((x, 0.01 * y), score=plain_score), **options)
        second = fitted(first, validation=judged((x, y + 3), score=score), **options)
        of_first = np.array([score(member, (x, y + 3), None) for member in first.ensemble.unstack()])
        of_second = second.history.validation[:, 2:]
        np.testing.assert_allclose(second.best_score, np.minimum(of_first, of_second.min(axis=1)), rtol=1e-5)
        assert (second.best_step > 10).any()

    def test_a_score_that_is_undefined_there_is_the_worst(self, ensemble):
        first = fitted(ensemble, validation=ee.train.Validation(data(24), score=plain_score, mode="min"), epochs=1)
        score = lambda model, batch, key: jnp.where(model.layers[0].weight[0, 0] > 1e9, 0.0, jnp.nan)
        with pytest.warns(UserWarning, match="validation scores that are NaN"):
            run = fitted(first, validation=ee.train.Validation(data(24), score=score, mode="min"), epochs=1)
        assert np.isinf(run.best_score).all()


def test_a_status_that_was_reset(ensemble):
    first = fitted(ensemble, epochs=2, stop=ee.train.Stopping(steps=[3, 3, 99, 99]), validation=data(24), patience=1)
    anew = eqx.tree_at(lambda run: run.train_state.moving.status, first, jnp.zeros(MEMBERS, jnp.int8))
    run = fitted(anew, epochs=1, validation=data(24))
    assert (run.stopped_at == -1).all()
    assert (run.status == Status.OK).all()
    assert (run.fault == "").all()
    whole = fitted(ensemble, epochs=3, validation=data(24))
    assert_same(tree_of(run, 3), tree_of(whole, 3))  # never stopped, so that nothing is left of the reset


def tree_of(run, member):
    return run.train_state.ensemble[member]


class TestRefused:
    def test_what_the_state_has_already(self, ensemble):
        state = ee.train.init(ensemble, ADAM, key=KEY)
        with pytest.raises(TypeError, match="which already contains `hyper`, `trainable`: omit them"):
            fitted(state, epochs=1, hyper=jnp.ones(MEMBERS), trainable=lambda x: True)

    def test_another_optimiser(self, ensemble):
        state = ee.train.init(ensemble, optax.sgd(0.1), key=KEY)
        with pytest.raises(TypeError, match="another optimiser made"):
            fitted(state, epochs=1)

    def test_no_member_trains(self, ensemble):
        run = fitted(ensemble, epochs=2, stop=ee.train.Stopping(steps=3))
        with pytest.raises(ValueError, match="all 4 members have stopped or diverged"):
            fitted(run, epochs=1)

    def test_all_failed_before_their_first_validation(self, ensemble):
        """Their history has validations without members, none of which is kept."""
        huge = optax.sgd(1e30)
        with pytest.warns(UserWarning, match="diverged"):
            run = ee.fit(ensemble, loss, huge, data(40), batch_size=8, epochs=2, validation=data(16), key=KEY)
        assert run.history.validation_step.tolist() == []
        with pytest.raises(ValueError, match="all 4 members have stopped or diverged"):
            ee.fit(run, loss, huge, data(40), batch_size=8, epochs=1, validation=data(16), key=KEY)

    def test_best_weights_would_be_forgotten(self, ensemble):
        run = fitted(ensemble, epochs=1, validation=data(16))
        with pytest.raises(TypeError, match=r"fit\(run.train_state"):
            fitted(run, epochs=1)
        assert fitted(run.train_state, epochs=1).selection is None


class TestDuration:
    def test_is_that_of_all_runs(self, ensemble, tmp_path):
        """As the history is: in memory, and resumed from a checkpoint."""
        first = fitted(ensemble, steps=5)
        second = fitted(first, steps=5, checkpoint=tmp_path / "a")
        assert second.seconds > first.seconds
        earlier = eqx.tree_at(lambda run: run.seconds, first, 100.0)
        assert 100 < fitted(earlier, steps=5).seconds < 200
        assert fitted(earlier, steps=5, checkpoint=tmp_path / "a").seconds == pytest.approx(second.seconds, abs=1)

    def test_does_not_count_for_max_seconds(self, ensemble):
        earlier = eqx.tree_at(lambda run: run.seconds, fitted(ensemble, steps=5), 1e6)
        run = fitted(earlier, steps=5, stop=ee.train.Stopping(seconds=1000))
        assert run.status.tolist() == [ee.train.Status.OK] * MEMBERS

    def test_of_rounds(self, ensemble):
        """A method of several runs tells the duration of all."""
        durations = []
        run = ee.methods.successive_halving(
            ensemble, loss, ADAM, data(40), validation=data(16), epochs=1, batch_size=8, progress=False, key=KEY,
            callbacks=lambda progress: durations.append((progress.step, progress.seconds)),
        )  # fmt: skip
        first = [seconds for step, seconds in durations if step <= 5]
        assert len(durations) > len(first) > 0
        assert run.seconds > first[-1] + durations[-1][1]
