"""A population whose shards do not wait is that of the algorithm, simulated without the library's training."""

import dataclasses
import shutil
import warnings
from collections import deque
from concurrent.futures import BrokenExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet._serialise import dumps, loads
from eqx_ensemble.train import Status

from .executors import Here
from .test_fit import KEY, SEQUENTIAL
from .test_halving import KillsLater
from .test_pbt import ENSEMBLE as LINEAR
from .test_pbt import MEMBERS, Once, assert_same, train

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

ROUNDS, STEPS, FRACTION = 4, 3, 0.3
RATES = np.geomspace(1e-3, 0.3, MEMBERS).astype(np.float32)
TARGETS, HELD = [0.7, 0.2], 0.5  # of the first and the second batch of an epoch
ROWS = jnp.repeat(jnp.array(TARGETS), 4)


class Point(eqx.Module):
    place: jax.Array

    def __call__(self, x):
        return self.place


POINTS = ee.build(lambda key: Point(3 * jax.random.normal(key)), MEMBERS, key=KEY)
square = lambda model, batch, key: (model.place - jnp.mean(batch)) ** 2
shrink = lambda hyper, key: {"rate": hyper["rate"] * 0.8}


def evolve(executor=None, **more):
    options = {
        "hyper": {"rate": RATES}, "validation": jnp.full(4, HELD), "rounds": ROUNDS, "steps": STEPS, "batch_size": 4,
        "order": "given", "fraction": FRACTION, "explore": shrink, "shard": 2, "workers": 1, "plan": SEQUENTIAL,
        "key": KEY,
    }  # fmt: skip
    options |= {"asynchronous": True} | more
    return ee.fleet.population_based_training(
        executor or Here(), POINTS, square, lambda hyper: optax.sgd(hyper["rate"]), ROWS, **options
    )


def simulate(*, size, workers):
    """Algorithm 1 of Jaderberg et al. (2017), gradient descent on parabolas by its formula.

    Workers end in the order in which they began, and each begins again at once. Batches are those of a member's own
    steps, however far its donor was.
    """
    places, rates = np.asarray(POINTS.stacked.place, np.float64).copy(), RATES.astype(np.float64)
    ended, keys = np.zeros(MEMBERS, int), jax.random.split(KEY, ROUNDS)
    best, last = places.copy(), rates.copy()  # what each member had when it ended a round
    scores, lineage = np.full((ROUNDS, MEMBERS), np.nan), np.tile(np.arange(MEMBERS), (ROUNDS, 1))
    ready, running = deque(np.array_split(np.arange(MEMBERS), MEMBERS // size)), deque()
    while ready or running:
        while ready and len(running) < workers:
            shard = ready.popleft()
            number = ended[shard[0]]
            if number:
                known = np.flatnonzero(ended)
                latest = scores[ended[known] - 1, known]
                donors = ee.methods.population.truncation(latest, fraction=FRACTION, key=keys[number])
                donors = dict(zip(known.tolist(), known[donors].tolist(), strict=True))
                for member in shard:
                    donor = donors[member]
                    lineage[number - 1, member] = donor
                    places[member], rates[member] = best[donor], last[donor] * (0.8 if donor != member else 1)
            running.append(shard)
        shard = running.popleft()
        for member in shard:
            for step in range(STEPS * ended[member], STEPS * (ended[member] + 1)):
                target = TARGETS[step % 2]
                places[member] = target + (places[member] - target) * (1 - 2 * rates[member])
            scores[ended[member], member] = (places[member] - HELD) ** 2
        best[shard], last[shard] = places[shard], rates[shard]
        ended[shard] += 1
        if ended[shard[0]] < ROUNDS:
            ready.append(shard)
    return places, rates, scores, lineage


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (2, 2), (3, 2), (2, 3), (6, 1)])
def test_is_the_algorithm(size, workers):
    found = evolve(shard=size, workers=workers)
    places, rates, scores, lineage = simulate(size=size, workers=workers)
    np.testing.assert_array_equal(found.lineage, lineage)
    assert (lineage != np.arange(MEMBERS)).any()
    # float32 beside float64: twelve steps of a relative rounding each.
    np.testing.assert_allclose(found.scores, scores, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(found.run.train_state.ensemble.stacked.place, places, rtol=2e-5)
    np.testing.assert_allclose(found.run.train_state.hyper["rate"], rates, rtol=1e-6)
    np.testing.assert_allclose(found.hyper["rate"][-1], rates, rtol=1e-6)
    assert int(found.run.train_state.step) == ROUNDS * STEPS


def test_one_shard_of_all_is_that_of_one_process():
    found = train(ee.fleet.population_based_training, "steps", Here(), shard=MEMBERS, asynchronous=True)
    assert_same(found, train(ee.methods.population_based_training, "steps"))


class TestWorkersThatDie:
    def test_a_checkpoint_goes_on(self, tmp_path):
        expected = evolve(workers=2)
        with pytest.warns(UserWarning, match="stops the members .* at an earlier round"):
            evolve(Here(kills=[5]), workers=2, retries=0, checkpoint=tmp_path)
        executor = Here()
        assert_same(evolve(executor, workers=2, checkpoint=tmp_path), expected)
        with pytest.raises(ValueError, match=r"a different call.\n  rounds: saved 4, now 5"):
            evolve(workers=2, checkpoint=tmp_path, rounds=5)
        with pytest.raises(FileExistsError, match="must not resume"):
            evolve(workers=2, checkpoint=tmp_path, resume="never")
        assert_same(evolve(workers=2, checkpoint=tmp_path, resume="must"), expected)
        with pytest.raises(FileNotFoundError, match="found no checkpoint"):
            evolve(workers=2, checkpoint=tmp_path / "empty", resume="must")

    def test_the_others_go_on(self):
        with pytest.warns(UserWarning, match="stops the members 0, 1 at an earlier round"):
            found = evolve(lambda: KillsLater([0, 1]), retries=0)
        assert found.run.status.tolist() == [Status.STOPPED] * 2 + [Status.OK] * 4
        assert np.isnan(found.scores[1:, :2]).all()
        assert np.isfinite(found.scores[:, 2:]).all()
        assert found.lineage[:, :2].tolist() == [[0, 1]] * ROUNDS
        assert found.run.stopped_at[:2].tolist() == [STEPS, STEPS]
        # The two that are lost are not those that are replaced, of which there are two of four in each round.
        assert (found.lineage[:-1, 2:] != np.arange(2, MEMBERS)).any(axis=1).all()
        assert not set(found.lineage[:, 2:].ravel().tolist()) & {0, 1}

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("executor", [lambda: Once([2]), lambda: lambda: KillsLater([0, 1])])
    def test_the_same_call_after_others_went_on(self, tmp_path, executor, workers):
        """It repeats what was decided without them, and then they go on too."""
        call = lambda *args, **more: evolve(*args, workers=workers, retries=0, checkpoint=tmp_path, **more)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where two broke together, both are tried again
            before = call(executor())
        again, reports = call(), []
        assert again.run.ensemble.ids.tolist() == list(range(MEMBERS))
        assert (again.run.status == Status.OK).all()
        assert np.isfinite(again.scores).all()
        whole = np.isin(again.run.ensemble.ids, before.run.ensemble.ids[np.isfinite(before.scores).all(axis=0)])
        kept = np.isfinite(before.scores).all(axis=0)
        np.testing.assert_array_equal(again.scores[:, whole], before.scores[:, kept])
        np.testing.assert_array_equal(again.lineage[:, whole], before.lineage[:, kept])
        assert_same(call(on_shard=reports.append), again)
        assert not any(report.error for report in reports)

    @pytest.mark.slow
    def test_a_shard_that_was_done_before(self, tmp_path):
        """Another course would be another call."""
        expected = evolve(checkpoint=tmp_path)
        shutil.rmtree(tmp_path / "round-01" / "shard-00000")
        with pytest.raises(BrokenExecutor, match="cannot resume .* a shard that was completed before"):
            evolve(lambda: KillsLater([0, 1]), retries=0, checkpoint=tmp_path)
        assert_same(evolve(checkpoint=tmp_path), expected)

    def test_an_executor_that_does_not_begin_again(self):
        """Also members that wait for a worker stop, and those that have not begun are named."""
        with pytest.warns(UserWarning, match="stops the members 0, 1, 2, 3, 4, 5 at an earlier round"):
            found = evolve(Here(kills=[4]), retries=0)
        assert (found.run.status == Status.STOPPED).all()
        with (
            pytest.warns(UserWarning, match="returns without the members 2, 3, 4, 5: their workers died"),
            pytest.warns(UserWarning, match="stops the members 0, 1 at an earlier round"),
        ):
            found = evolve(Here(kills=[1]), retries=0)
        assert found.run.ensemble.ids.tolist() == [0, 1]

    def test_before_their_first_round(self):
        with pytest.warns(UserWarning, match="returns without the members"):
            found = evolve(Once([2]), retries=0)
        assert found.run.ensemble.ids.tolist() == [0, 1, 2, 3]
        assert found.scores.shape == (ROUNDS, 4)
        assert set(found.lineage.ravel().tolist()) <= {0, 1, 2, 3}


class TestInterruption:
    @pytest.mark.slow
    def test_by_the_caller(self, tmp_path):
        """Copies that did not train are no descendants; the same call goes on."""
        reports = []

        def interrupt(report):
            reports.append(report)
            if len(reports) == 5:
                raise KeyboardInterrupt

        with pytest.warns(UserWarning, match="was interrupted"):
            found = evolve(on_shard=interrupt, checkpoint=tmp_path)
        expected = evolve()
        assert np.isfinite(found.scores).sum(axis=0).tolist() == [2, 2, 2, 2, 1, 1]
        assert found.lineage[0].tolist() == [*expected.lineage[0, :4].tolist(), 4, 5]
        assert found.lineage[0].tolist() != expected.lineage[0].tolist()
        assert found.run.interrupted
        assert_same(evolve(checkpoint=tmp_path), expected)

    def test_of_a_worker(self):
        """Half a round is none."""

        class Interrupted(Here):
            def submit(self, fn, /, *args):
                future = super().submit(fn, *args)
                if len(self.calls) == 5:
                    outcome = loads(future.result())
                    outcome = outcome._replace(result=dataclasses.replace(outcome.result, interrupted=True))
                    future._result = dumps(outcome, name="test")
                return future

        with pytest.warns(UserWarning, match="was interrupted"):
            found = evolve(Interrupted())
        assert found.run.interrupted
        assert np.isfinite(found.scores).sum(axis=0).tolist() == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_numbers_of_numpy_in_a_folder(unhooked, tmp_path, asynchronous):
    numbers = {"rounds": np.int64(ROUNDS), "steps": np.int32(STEPS), "fraction": np.float32(0.5)}
    options = {"checkpoint": tmp_path, "asynchronous": asynchronous}
    found = evolve(**options, **numbers)
    assert_same(evolve(**options, fraction=0.5), found)
    with pytest.raises(ValueError, match=r"fraction: saved 0.5, now 0.25"):
        evolve(**options, fraction=np.float32(0.25))


@pytest.mark.filterwarnings("ignore:.*diverged")
def test_members_that_diverge_are_replaced():
    rates = RATES.copy()
    rates[:2] = 1e30
    found = evolve(hyper={"rate": rates})
    assert (found.run.status == Status.OK).all()
    assert not np.isfinite(found.scores[0, :2]).any()
    assert np.isfinite(found.scores[1:]).all()
    assert not set(found.lineage[0, :2].tolist()) & {0, 1}
    assert int(found.run.train_state.step) == ROUNDS * STEPS
    found = evolve(hyper={"rate": np.full(MEMBERS, 1e30, np.float32)})
    assert (found.run.status == Status.DIVERGED).all()
    assert found.scores.shape == (1, MEMBERS)


@pytest.mark.filterwarnings("ignore:.*diverged")
def test_a_shard_that_diverges_waits_for_donors():
    """It ends its first round while the only other shard still trains."""
    rates = RATES.copy()
    rates[:3] = 1e30
    found = evolve(hyper={"rate": rates}, shard=3, workers=2)
    assert (found.run.status == Status.OK).all()
    assert np.isfinite(found.scores[1:]).all()
    assert set(found.lineage[0, :3].tolist()) <= {3, 4, 5}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("history", ["all", 2])
def test_a_shard_that_diverges_is_at_the_step_of_the_others(history):
    """Their histories have the same columns, and its copies train where a round begins."""
    rates = RATES.copy()
    rates[:2] = 1e30
    expected, found = evolve(history=history).run, evolve(hyper={"rate": rates}, history=history, workers=2).run
    np.testing.assert_array_equal(found.history.step, expected.history.step)
    np.testing.assert_array_equal(found.history.validation_step, expected.history.validation_step)
    columns = (expected.history.step > 2) & (expected.history.step <= STEPS)
    assert not np.isfinite(found.history.loss[:2, columns]).any()
    assert np.isfinite(found.history.loss[:, expected.history.step > STEPS]).all()
    assert np.isfinite(found.history.validation[:, STEPS:]).all()
    assert (found.best_step[:2] > STEPS).all()


def test_what_is_refused(unhooked):
    assert len(LINEAR) == MEMBERS
    for options, error, text in (
        ({"asynchronous": 1}, TypeError, "`asynchronous`"),
        ({"shard": 1}, ValueError, "`shard`"),
        ({"on_shard": 3}, TypeError, "`on_shard` to be a function"),
        ({"patience": 2}, TypeError, "`patience`"),
        ({"resume": "must"}, (TypeError, ValueError), "checkpoint"),
    ):
        with pytest.raises(error, match=text):
            evolve(**options)
