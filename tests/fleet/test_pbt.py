"""A population over workers is that of one process, bit for bit under `Sequential`."""

import shutil
import warnings
from concurrent.futures import BrokenExecutor

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from .executors import Here
from .test_fit import KEY, SEQUENTIAL, X, Y, assert_equal, mse
from .test_halving import KillsLater

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

MEMBERS = 6
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)
RANGES = {"rate": ee.sweep.LogUniform(1e-4, 1e-1)}
HYPER = ee.sweep.draw(RANGES, MEMBERS, key=KEY)
sgd = lambda hyper: optax.sgd(hyper["rate"], momentum=0.9)
OPTIONS = {
    "hyper": HYPER, "validation": (X[:9], Y[:9]), "rounds": 3, "steps": 5, "fraction": 0.3, "batch_size": 8,
    "plan": SEQUENTIAL, "key": KEY,
}  # fmt: skip
CASES = {
    "steps": {},
    "rows": {"rows": ee.resample.bootstrap(37, MEMBERS, key=KEY), "epochs": 1, "steps": None},
    "own data": {"data": (ee.Each(np.stack([X + i for i in range(MEMBERS)])), Y), "mode": "max", "score": mse},
    "diverged": {"hyper": {"rate": np.array([1e-3, 1e30, 1e-2, 1e30, 1e-1, 1e-3], np.float32)}},
    "a shard diverged": {"hyper": {"rate": np.array([1e30, 1e30, 1e-3, 1e-2, 1e-1, 1e-3], np.float32)}},
    "ranges": {"explore": ee.methods.population.perturb_hyper(RANGES)},
}


def train(call, case, *args, **more):
    options = {"data": (X, Y)} | OPTIONS | CASES[case] | more
    return call(*args, ENSEMBLE, mse, sgd, options.pop("data"), **options)


def assert_same(found, expected):
    assert_equal(found.run, expected.run)
    past = lambda population: jax.tree.leaves((population.scores, population.lineage, population.hyper))
    for x, y in zip(past(found), past(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def expected():
    known = {}

    def of(case):
        if case not in known:
            known[case] = train(ee.methods.population_based_training, case)
        return known[case]

    return of


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("steps", "a shard diverged") else pytest.mark.slow) for case in CASES],
)
def test_rounds_over_workers_are_those_of_one_process(expected, case):
    found = train(ee.fleet.population_based_training, case, Here(), shard=2)
    assert_same(found, expected(case))
    assert (found.lineage[:-1] != np.arange(MEMBERS)).any()


class TestWorkersThatDie:
    def test_a_checkpoint_goes_on(self, expected, tmp_path):
        call = lambda executor, **more: train(
            ee.fleet.population_based_training, "steps", executor, shard=2, checkpoint=tmp_path, **more
        )
        with pytest.raises(Exception, match="a worker died"):
            call(Here(kills=[3]))
        executor = Here()
        assert_same(call(executor), expected("steps"))
        with pytest.raises(ValueError, match=r"a different call.\n  rounds: saved 3, now 4"):
            call(Here(), rounds=4)
        with pytest.raises(ValueError, match="this call differs"):
            train(
                ee.fleet.population_based_training, "steps", Here(), checkpoint=tmp_path,
                hyper={"rate": np.full(MEMBERS, 1e-3, np.float32)},
            )  # fmt: skip

    def test_members_are_replaced(self):
        """Those of a shard whose worker dies from the second round on become copies of others, in the same round."""
        with pytest.warns(UserWarning, match="stops the members 0, 1 where the round before ended"):
            found = train(ee.fleet.population_based_training, "steps", lambda: KillsLater([0, 1]), shard=2, retries=0)
        assert found.run.ensemble.ids.tolist() == list(range(MEMBERS))
        assert np.isnan(found.scores[1:, :2]).all()
        assert not set(found.lineage[1].tolist()) & {0, 1}
        assert np.isfinite(found.scores[:, 2:]).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("executor", [lambda: Once([2]), lambda: lambda: KillsLater([0, 1])])
    def test_the_same_call_after_others_went_on(self, tmp_path, executor):
        """Rounds that began without some members are those of the same call again."""
        call = lambda executor: train(
            ee.fleet.population_based_training, "steps", executor, shard=2, retries=0, checkpoint=tmp_path
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = call(executor())
        with pytest.warns(UserWarning, match="members (0, 1 where|4, 5, as before)"):
            again = call(Here())
        assert again.run.ensemble.ids.tolist() == before.run.ensemble.ids.tolist()
        np.testing.assert_array_equal(again.scores[:2], before.scores[:2])
        np.testing.assert_array_equal(again.lineage, before.lineage)
        assert np.isfinite(again.scores[2]).all()

    @pytest.mark.slow
    def test_a_shard_that_was_done_before(self, expected, tmp_path):
        call = lambda executor: train(
            ee.fleet.population_based_training, "steps", executor, shard=2, retries=0, checkpoint=tmp_path
        )
        call(Here())
        shutil.rmtree(tmp_path / "round-01" / "shard-00000-of-00003")
        with pytest.raises(BrokenExecutor, match="cannot resume in .*round-01`: .*a shard that was completed before"):
            call(lambda: KillsLater([0, 1]))
        assert_same(call(Here()), expected("steps"))

    @pytest.mark.slow
    def test_members_that_nobody_went_on_without(self, expected, tmp_path):
        """They are tried again."""
        call = lambda executor: train(
            ee.fleet.population_based_training, "steps", executor, shard=2, retries=0, checkpoint=tmp_path
        )
        with pytest.raises(Exception, match="a worker died"), pytest.warns(UserWarning, match="stops the members"):
            call(Here(kills=[4]))
        assert_same(call(Here()), expected("steps"))


class TestInterruption:
    def test_before_a_shard_of_a_round(self, expected):
        """The round has not begun: the result is that of the rounds before."""

        class Interrupted(Here):
            def submit(self, fn, /, *args):
                if len(self.calls) == 3:
                    raise KeyboardInterrupt
                return super().submit(fn, *args)

        found = train(ee.fleet.population_based_training, "steps", Interrupted(), shard=2)
        assert found.run.interrupted
        np.testing.assert_array_equal(found.scores, expected("steps").scores[:1])
        np.testing.assert_array_equal(found.lineage, [np.arange(MEMBERS)])
        np.testing.assert_array_equal(found.run.history.loss, expected("steps").run.history.loss[:, :5])
        assert (found.run.status == Status.OK).all()


class Once:
    """Makes executors, of which the first breaks at these calls."""

    def __init__(self, kills):
        self.kills = kills

    def __call__(self):
        kills, self.kills = self.kills, ()
        return Here(kills)


@pytest.mark.parametrize("search", ["population_based_training", "successive_halving"])
def test_batches_of_a_function_are_not_cut(search):
    """A round of a few steps would see the first batches again."""
    options = {word: OPTIONS[word] for word in ("hyper", "validation", "steps", "plan", "key")} | {"shard": 2}
    options |= {"rounds": 2} if search == "population_based_training" else {}
    with pytest.raises(TypeError, match=f"fleet.{search}` needs `epochs`, not `steps`, with an iterable of batches"):
        getattr(ee.fleet, search)(Here(), ENSEMBLE, mse, sgd, lambda ids: [(X, Y)] * 8, **options)


def test_what_is_refused(unhooked):
    for options, text in (
        ({"hyper": None}, "needs `hyper"),
        ({"patience": 2}, "`patience`"),
        ({"fraction": 2}, "`fraction`"),
        ({"validation": None}, "needs `validation="),
        ({"save": "folder"}, "does not take `save`: it compares"),
        ({"on_diverge": "revive"}, "revive|copies|diverge"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            train(ee.fleet.population_based_training, "steps", Here(), **options)
