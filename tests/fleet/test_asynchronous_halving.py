"""ASHA, against its Algorithm 2 written out from the paper, and against runs of single members."""

import collections
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet._ladder import Ladder
from eqx_ensemble.train import Status

from .executors import Here
from .killing import kill_waiting, make_held_loss
from .test_halving import ENSEMBLE, HYPER, MEMBERS, OPTIONS, X, Y, mse, sgd

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")


class Paper:
    """Algorithm 2 of Li et al. (2020), of configurations that are drawn in order."""

    def __init__(self, configurations, eta, top):
        self.left, self.eta, self.top = list(configurations), eta, top
        self.rungs = collections.defaultdict(list)  # what has finished: (score, configuration)
        self.promoted = collections.defaultdict(set)

    def get_job(self):
        for k in range(self.top - 1, -1, -1):
            candidates = [c for _, c in sorted(self.rungs[k])[: len(self.rungs[k]) // self.eta]]
            promotable = [c for c in candidates if c not in self.promoted[k]]
            if promotable:
                self.promoted[k].add(promotable[0])
                return promotable[0], k + 1
        return (self.left.pop(0), 0) if self.left else None


def simulate(ladder, next_job, finish, scores, workers, seed):
    """Runs jobs of random lengths; returns them in the order in which they were given out."""
    generator, given, open_jobs = random.Random(seed), [], []
    while True:
        while len(open_jobs) < workers and (job := next_job()) is not None:
            given.append(job)
            open_jobs.append(job)
        if not open_jobs:
            return given
        finish(open_jobs.pop(generator.randrange(len(open_jobs))))


@pytest.mark.parametrize("seed", range(20))
def test_the_algorithm_of_the_paper(seed):
    count, eta, top, workers = 80, 2 + seed % 3, 3, 1 + seed % 5
    scores = np.random.default_rng(seed).normal(size=(count, top + 1))
    paper = Paper(range(count), eta, top)
    finish = lambda job: paper.rungs[job[1]].append((scores[job[0], job[1]], job[0]))
    expected = simulate(paper, paper.get_job, finish, scores, workers, seed)

    ladder = Ladder(count, top + 1, factor=eta, size=1)
    finish = lambda job: ladder.finish(job.rung, list(job.members), scores[list(job.members), job.rung])
    found = simulate(ladder, ladder.next_job, finish, scores, workers, seed)
    assert [(job.members[0], job.rung) for job in found] == expected
    assert {rung for _, rung in expected} == set(range(top + 1))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_promoted_members_are_among_the_best_of_those_that_have_finished(size, seed):
    count, factor, rungs = 60, 3, 4
    scores = np.random.default_rng(seed).normal(size=(count, rungs))
    scores[::7] = np.nan
    ladder, done = Ladder(count, rungs, factor=factor, size=size), collections.defaultdict(dict)

    def next_job():
        job = ladder.next_job()
        if job is not None and job.rung:
            below = done[job.rung - 1]
            best = sorted((score, member) for member, score in below.items() if not np.isnan(score))
            assert set(job.members) <= {member for _, member in best[: len(below) // factor]}
        return job

    def finish(job):
        found = scores[list(job.members), job.rung]
        ladder.finish(job.rung, list(job.members), found)
        done[job.rung] |= dict(zip(job.members, found, strict=True))

    given = simulate(ladder, next_job, finish, scores, 4, seed)
    trained = [(member, job.rung) for job in given for member in job.members]
    assert len(set(trained)) == len(trained)
    assert {member for member, rung in trained if rung == 0} == set(range(count))
    assert not any(ladder.promotable(rung) for rung in range(rungs - 1))
    if size > 1:  # whole shards while there are new members
        last_new = max(i for i, job in enumerate(given) if job.rung == 0)
        assert min(len(job.members) for job in given[:last_new]) >= size


def halve(*args, loss=mse, **more):
    options = OPTIONS | {"steps": 3, "shard": 3, "workers": 2} | more
    return ee.fleet.asynchronous_halving(*args, ENSEMBLE, loss, sgd, (X, Y), **options)


@pytest.fixture(scope="module")
def run():
    return halve(Here())


def test_members_are_those_of_one_fit(run):
    """A member that trained on with others, on any worker, is that of a run of the same length."""
    whole = ee.fit(ENSEMBLE, mse, sgd, (X, Y), steps=27, **OPTIONS)
    ends = np.where(run.status == Status.OK, 27, run.stopped_at)
    assert sorted(set(ends.tolist())) == [3, 9, 27]
    for member, end in enumerate(ends):
        np.testing.assert_array_equal(run.history.loss[member, :end], whole.history.loss[member, :end])
        assert np.isnan(run.history.loss[member, end:]).all()
    last = ends == 27
    np.testing.assert_array_equal(
        np.asarray(run.train_state.params.weight)[last], np.asarray(whole.train_state.params.weight)[last]
    )


def test_decisions_follow_from_the_order(run):
    """With one worker in this process they are those of Algorithm 2 with these scores."""
    found = halve(Here(), shard=1, workers=1)
    whole = ee.fit(ENSEMBLE, mse, sgd, (X, Y), steps=27, **OPTIONS)
    paper, ends = Paper(range(MEMBERS), 3, 2), {}
    column = {0: 3, 1: 9, 2: 27}
    steps = found.history.validation_step.tolist()
    while (job := paper.get_job()) is not None:
        member, rung = job
        ends[member] = column[rung]
        paper.rungs[rung].append((found.history.validation[member, steps.index(column[rung])], member))
    assert ends == dict(enumerate(np.where(found.status == Status.OK, 27, found.stopped_at).tolist()))
    for member, end in ends.items():
        np.testing.assert_allclose(found.history.loss[member, :end], whole.history.loss[member, :end], rtol=1e-4)


class TestWorkersThatDie:
    def test_a_factory_begins_again(self, run):
        found = halve(lambda: Here(kills=[3]))
        assert found.history.loss.shape == run.history.loss.shape
        assert (found.status != Status.DIVERGED).all()
        assert len(found.status) == MEMBERS

    @pytest.mark.parametrize("kill", [2, pytest.param(3, marks=pytest.mark.slow)])
    def test_a_checkpoint_goes_on(self, run, tmp_path, kill):
        with pytest.warns(UserWarning, match="asynchronous_halving"):
            halve(Here(kills=[kill]), checkpoint=tmp_path)
        found = halve(Here(), checkpoint=tmp_path)
        np.testing.assert_array_equal(found.stopped_at, run.stopped_at)
        np.testing.assert_array_equal(found.history.loss, run.history.loss)
        with pytest.raises(ValueError, match="belongs to a different call"):
            halve(Here(), checkpoint=tmp_path, factor=2)

    @pytest.mark.slow
    def test_the_same_call_after_others_went_on(self, run, tmp_path):
        """It repeats what was decided without them, and then they go on too."""
        executors = iter([Here(kills=[0])])
        options = {"workers": 1, "checkpoint": tmp_path}
        with pytest.warns(UserWarning, match="returns without the members 0, 1, 2: their workers died"):
            before = halve(lambda: next(executors, Here()), retries=0, **options)
        assert before.ensemble.ids.tolist() == list(range(3, MEMBERS))
        again = halve(Here(), **options)
        assert again.ensemble.ids.tolist() == list(range(MEMBERS))
        trained = lambda run: np.isfinite(run.history.loss).sum(axis=1)
        assert (trained(again)[3:] >= trained(before)).all()
        assert trained(again).max() == trained(run).max()
        np.testing.assert_array_equal(halve(Here(), **options).history.loss, again.history.loss)

    def test_members_that_did_not_begin_are_named(self):
        with pytest.warns(UserWarning, match="returns without the members 3, 4, 5, 6, 7, 8: their workers died"):
            found = halve(Here(kills=[1]), retries=0, workers=1)
        assert found.ensemble.ids.tolist() == [0, 1, 2]

    @pytest.mark.slow
    def test_pools_of_processes(self, tmp_path):
        """One worker at a time, so that the order is that of one process; killed in the middle of a rung."""
        spawn = lambda: ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        loss = make_held_loss(tmp_path / "killed", steps=25)  # evaluations; the first rung has some 30
        options = {"workers": 1, "loss": loss}
        (tmp_path / "killed").mkdir()
        with kill_waiting(tmp_path / "killed", times=2) as killed:
            found = halve(spawn, checkpoint=tmp_path / "runs", checkpoint_every=2, **options)
        assert len(set(killed)) == 2
        expected = halve(Here(), **options)
        np.testing.assert_array_equal(found.stopped_at, expected.stopped_at)
        np.testing.assert_array_equal(found.history.loss, expected.history.loss)


def test_what_is_refused(unhooked):
    with pytest.raises(TypeError, match="asynchronous_halving` needs `validation="):
        halve(Here(), validation=None)
    with pytest.raises(ValueError, match="`shard`"):
        halve(Here(), shard=0)
    with pytest.raises(TypeError, match="needs `on_shard` to be a function"):
        halve(Here(), on_shard=3)
    assert set(HYPER) == {"rate"}
