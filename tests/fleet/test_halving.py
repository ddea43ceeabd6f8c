"""Rungs over workers are those of one process, bit for bit under `Sequential`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import grouped
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


def on_workers(executor, shard=2, **options):
    return {"fit": ft.partial(ee.fleet.fit, executor, shard=shard, **options)}


def halve(case, **more):
    options = {"data": (X, Y)} | OPTIONS | CASES[case] | more
    return ee.methods.successive_halving(ENSEMBLE, mse, sgd, options.pop("data"), **grouped(options))


@pytest.fixture(scope="module")
def expected():
    known = {}

    def of(case):
        if case not in known:
            known[case] = halve(case)
        return known[case]

    return of


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "steps" else pytest.mark.slow) for case in CASES]
)
def test_rungs_over_workers_are_those_of_one_process(expected, case):
    found = halve(case, **on_workers(Here()))
    assert_equal(found, expected(case))
    assert (found.status == Status.STOPPED).any()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, 4, 20])
def test_any_size_of_shards(expected, shard):
    assert_equal(halve("steps", **on_workers(Here(), shard)), expected("steps"))


@pytest.mark.slow
def test_another_number_of_rungs_is_another_result(expected):
    found = halve("steps", **on_workers(Here()), rungs=2)
    with pytest.raises(AssertionError):
        assert_equal(found, expected("steps"))


@pytest.mark.slow
def test_hyperband(tmp_path):
    ranges = {"rate": ee.sweep.LogUniform(1e-4, 1e-1)}
    options = {"validation": (X[:9], Y[:9]), "epochs": 3, "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
    call = lambda **more: ee.methods.hyperband(make, ranges, mse, sgd, (X, Y), **grouped(options | more))
    expected = call()
    for _ in range(2):
        found = call(**on_workers(Here()), checkpoint=tmp_path)
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


class TestWorkersThatDie:
    def test_a_factory_begins_again(self, expected):
        assert_equal(halve("steps", **on_workers(lambda: Here(kills=[3]))), expected("steps"))

    @pytest.mark.filterwarnings("ignore:.*returns without")
    @pytest.mark.parametrize("rung", [0, 1])
    def test_members_that_are_lost(self, expected, tmp_path, rung):
        """The search does not go on without them; the same call trains them, and none that was done."""
        executors = iter(
            [Here(kills=[0]), Here(kills=[0])] if rung == 0 else [Here(), Here(kills=[0]), Here(kills=[0])]
        )
        factory = lambda: next(executors, Here())
        with pytest.raises(ee.MemberMismatchError, match=r"(?s)returned without . of them, ids \[.*with `checkpoint=`"):
            halve("steps", **on_workers(factory, retries=0), checkpoint=tmp_path)
        assert_equal(halve("steps", **on_workers(Here()), checkpoint=tmp_path), expected("steps"))


class TestInAFolder:
    def test_another_call(self, expected, tmp_path, unhooked):
        call = lambda **more: halve("steps", **(on_workers(Here()) | {"checkpoint": tmp_path} | more))
        with pytest.raises(FileNotFoundError, match="must resume"):
            call(resume="must")
        assert_equal(call(), expected("steps"))
        assert_equal(call(resume="must"), expected("steps"))
        assert [len(list(tmp_path.glob(f"round-00000{i}/*/step-*"))) > 0 for i in range(4)] == [True] * 3 + [False]
        for changes, text in (
            ({"factor": 2}, "`factor`: saved 3, now 2"),
            ({"steps": 4}, "`steps`: saved 3, now 4"),
            ({"fit": ee.fit}, "`fit`: saved with it, now without it"),
            ({"key": jax.random.key(1)}, "not the same"),
        ):
            with pytest.raises(ValueError, match=text):
                call(**changes)

    def test_after_one_that_failed(self, tmp_path):
        with pytest.raises(ValueError, match="one dataset|rows"):
            halve("steps", **on_workers(Here()), checkpoint=tmp_path, factor=2, data=(X[:5], Y))
        halve("steps", **on_workers(Here()), checkpoint=tmp_path, rungs=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (on_workers(Here(), save="folder"), "does not take `save`: it compares"),
        (on_workers(Here()) | {"ids": range(9)}, "does not take `ids`: it compares"),
        ({"fit": None}, "needs `fit` to be a function"),
        ({"fit": lambda *args, **options: None}, "needs `fit` to return a run"),
        (on_workers(Here()) | {"batchsize": 3}, "has no option `batchsize`"),
        (on_workers(Here()) | {"data": lambda ids: [(X, Y)] * 8}, "needs `epochs`, not `steps`, with an iterable"),
    ],
)
def test_what_is_refused(unhooked, options, text):
    with pytest.raises(TypeError, match=text):
        halve("steps", **({"rows": None} | options))
