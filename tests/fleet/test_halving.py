"""Rungs over workers are those of one process, bit for bit under `Sequential`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from .executors import Here
from .test_fit import KEY, SEQUENTIAL, X, Y, assert_equal, mse

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

make = lambda key: eqx.nn.Linear(3, 1, key=key)
MEMBERS = 9
ENSEMBLE = ee.build(make, MEMBERS, key=KEY)
sgd = lambda hyper: optax.sgd(hyper["rate"], momentum=0.9)
HYPER = {"rate": jnp.geomspace(1e-4, 1e-1, MEMBERS)}
ROWS = ee.resample.bootstrap(37, MEMBERS, key=KEY)
OWN = ee.Each(np.stack([X + i for i in range(MEMBERS)])), Y
LENGTH = {"steps": 3}
OPTIONS = {"hyper": HYPER, "validation": (X[:9], Y[:9]), "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
CASES = {
    "steps": LENGTH | {"rows": ROWS},
    "epochs, factor 2": {"epochs": 1, "factor": 2, "rungs": 3},
    "own data": LENGTH | {"data": OWN, "validation": (ee.Each(OWN[0].value[:, :9]), Y[:9])},
    "stops": LENGTH | {"max_steps": np.array([2, 99, 99, 99, 99, 99, 99, 4, 99]), "mode": "max", "score": mse},
    "diverged": LENGTH | {"hyper": {"rate": jnp.array([1e-3, 1e30, 1e-2, 0.1, 1e30, 0.1, 0.01, 0.02, 1e30])}},
}


def halve(call, case, *args, **more):
    options = {"data": (X, Y)} | OPTIONS | CASES[case] | more
    return call(*args, ENSEMBLE, mse, sgd, options.pop("data"), **options)


@pytest.fixture(scope="module")
def expected():
    known = {}

    def of(case):
        if case not in known:
            known[case] = halve(ee.methods.successive_halving, case)
        return known[case]

    return of


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "steps" else pytest.mark.slow) for case in CASES]
)
def test_rungs_over_workers_are_those_of_one_process(expected, case):
    found = halve(ee.fleet.successive_halving, case, Here(), shard=2)
    assert_equal(found, expected(case))
    assert (found.status == Status.STOPPED).any()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, 4, 20])
def test_any_size_of_shards(expected, shard):
    assert_equal(halve(ee.fleet.successive_halving, "steps", Here(), shard=shard), expected("steps"))


def test_another_number_of_rungs_is_another_result(expected):
    found = halve(ee.fleet.successive_halving, "steps", Here(), shard=2, rungs=2)
    with pytest.raises(AssertionError):
        assert_equal(found, expected("steps"))


@pytest.mark.slow
def test_hyperband():
    ranges = {"rate": ee.sweep.LogUniform(1e-4, 1e-1)}
    options = {"validation": (X[:9], Y[:9]), "epochs": 3, "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
    call = lambda call, *args, **more: call(*args, make, ranges, mse, sgd, (X, Y), **options, **more)
    expected = call(ee.methods.hyperband)
    found = call(ee.fleet.hyperband, Here(), shard=2)
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


class TestWorkersThatDie:
    def test_a_factory_begins_again(self, expected):
        found = halve(ee.fleet.successive_halving, "steps", lambda: Here(kills=[3]), shard=2)
        assert_equal(found, expected("steps"))

    def test_members_lost_at_a_later_rung_keep_what_they_had(self, expected):
        """Of two shards of the second rung, one always kills its worker."""
        whole = halve(ee.methods.successive_halving, "steps", factor=2, rungs=2)
        lost = np.sort(np.flatnonzero(whole.stopped_at == -1))[2:]
        with pytest.warns(UserWarning, match="stops the members .* where the rung before ended"):
            found = halve(
                ee.fleet.successive_halving, "steps", lambda: KillsLater(lost), shard=2, factor=2, rungs=2, retries=0
            )
        assert np.flatnonzero(found.status != whole.status).tolist() == lost.tolist()
        assert found.stopped_at[lost].tolist() == [3, 3]
        kept = np.setdiff1d(np.arange(MEMBERS), lost)
        np.testing.assert_array_equal(found.history.loss[kept], whole.history.loss[kept])
        np.testing.assert_array_equal(found.history.loss[lost, :3], whole.history.loss[lost, :3])
        assert np.isnan(found.history.loss[lost, 3:]).all()

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*diverged")
    @pytest.mark.parametrize("case", ["own data", "steps"])
    def test_those_of_the_first_rung_are_missing(self, case):
        """The others go on with their own data and rows."""
        executors = iter([Here(kills=[0]), Here(kills=[0])])  # with another shard, and alone
        with pytest.warns(UserWarning, match="returns without the members 0, 1"):
            found = halve(
                ee.fleet.successive_halving, case, lambda: next(executors, Here()), shard=2, retries=0, factor=2
            )
        whole = ee.fit(
            ENSEMBLE, mse, sgd, OWN if case == "own data" else (X, Y), steps=24,
            **(OPTIONS | {word: x for word, x in CASES[case].items() if word in ("rows", "validation")}),
        )  # fmt: skip
        ids = np.asarray(found.ensemble.ids)
        assert 0 not in ids
        kept = np.isfinite(found.history.loss)
        assert kept.sum() > 3 * len(ids)
        np.testing.assert_array_equal(found.history.loss[kept], whole.history.loss[ids][kept])

    def test_a_checkpoint_goes_on(self, expected, tmp_path):
        options = {"shard": 2, "checkpoint": tmp_path}
        with pytest.raises(Exception, match="a worker died"):
            halve(ee.fleet.successive_halving, "steps", Here(kills=[5]), **options)
        executor = Here()
        assert_equal(halve(ee.fleet.successive_halving, "steps", executor, **options), expected("steps"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["call.json", "rung-00", "rung-01", "rung-02"]
        with pytest.raises(ValueError, match="not the same"):
            halve(ee.fleet.successive_halving, "steps", Here(), **options, key=jax.random.key(1))


class TestOtherCalls:
    """In the folder of a search."""

    def test_another_factor(self, expected, tmp_path):
        call = lambda **more: halve(ee.fleet.successive_halving, "steps", Here(), checkpoint=tmp_path, **more)
        call(rungs=2)
        with pytest.raises(ValueError, match=r"a different call.\n  factor: saved 3, now 2\n"):
            call(factor=2)
        with pytest.raises(ValueError, match="steps: saved 3, now 4"):
            call(steps=4)
        assert_equal(call(), expected("steps"))  # more rungs go on

    def test_after_one_that_failed(self, tmp_path):
        with pytest.raises(ValueError, match="one dataset|rows"):
            halve(ee.fleet.successive_halving, "steps", Here(), checkpoint=tmp_path, factor=2, data=(X[:5], Y))
        halve(ee.fleet.successive_halving, "steps", Here(), checkpoint=tmp_path, rungs=1)

    @pytest.mark.parametrize("option", [{"save": "folder"}, {"ids": range(9)}])
    def test_what_is_refused(self, unhooked, option):
        with pytest.raises(
            TypeError, match=f"fleet.successive_halving` does not take `{next(iter(option))}`: it compares"
        ):
            halve(ee.fleet.successive_halving, "steps", Here(), **option)


class KillsLater(Here):
    """Breaks on the shard that goes on with these members."""

    def __init__(self, ids):
        super().__init__()
        self.ids = ids

    def submit(self, fn, /, *args):
        from eqx_ensemble.fleet._serialise import loads

        own = loads(args[1], [None] * 9)
        goes_on = isinstance(own["start"], ee.Run) and np.array_equal(own["ids"], self.ids)
        self.kills = [len(self.calls)] if goes_on else []
        return super().submit(fn, *args)
