"""A population over workers is that of one process, bit for bit under `Sequential`."""

import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import grouped
from .executors import Here
from .test_fit import KEY, SEQUENTIAL, X, Y, assert_equal, mse
from .test_halving import on_workers

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


def train(case, **more):
    options = {"data": (X, Y)} | OPTIONS | CASES[case] | more
    return ee.methods.population_based_training(ENSEMBLE, mse, sgd, options.pop("data"), **grouped(options))


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
            known[case] = train(case)
        return known[case]

    return of


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("steps", "a shard diverged") else pytest.mark.slow) for case in CASES],
)
def test_rounds_over_workers_are_those_of_one_process(expected, case):
    found = train(case, **on_workers(Here()))
    assert_same(found, expected(case))
    assert (found.lineage[:-1] != np.arange(MEMBERS)).any()


def test_a_checkpoint_goes_on(expected, tmp_path):
    call = lambda executor, **more: train("steps", **on_workers(executor), checkpoint=tmp_path, **more)
    with pytest.raises(Exception, match="a worker died"):
        call(Here(kills=[3]))
    assert_same(call(Here()), expected("steps"))
    with pytest.raises(ValueError, match="`rounds`: saved 3, now 4"):
        call(Here(), rounds=4)
    with pytest.raises(ValueError, match="differs"):
        call(Here(), explore=ee.methods.population.perturb_hyper(RANGES))
    with pytest.raises(ValueError, match="this call differs"):
        call(Here(), hyper={"rate": np.full(MEMBERS, 1e-3, np.float32)})


@pytest.mark.parametrize("number", [3, 4])
def test_ctrl_c(expected, number):
    """A round that some members have not begun has not taken place: the result is that of the rounds before."""

    class Interrupted(Here):
        def submit(self, fn, /, *args):
            if len(self.calls) == number:
                raise KeyboardInterrupt
            return super().submit(fn, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train("steps", **on_workers(Interrupted()))
    assert found.run.interrupted
    np.testing.assert_array_equal(found.scores, expected("steps").scores[:1])
    np.testing.assert_array_equal(found.lineage, [np.arange(MEMBERS)])
    np.testing.assert_array_equal(found.run.history.loss, expected("steps").run.history.loss[:, :5])
    assert (found.run.status == Status.OK).all()
