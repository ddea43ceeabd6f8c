"""Executors of all kinds: what they have to return, when they break, and how many workers they have."""

import multiprocessing
import types
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor

import equinox as eqx
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet import _engines
from eqx_ensemble.fleet._engines import check_not_forked, end_processes

from .executors import Here
from .test_fit import ENSEMBLE, KEY, OPTIMISER, OPTIONS, SEQUENTIAL, X, Y, assert_equal, fit, mse

PLAIN = OPTIONS["plain"] | {"plan": SEQUENTIAL, "shard": 2}


class Fails(Here):
    """The calls of these numbers fail as those of Ray or Parsl do: their futures hold an error of the engine."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def submit(self, fn, /, *args):
        if len(self.calls) not in self.fails:
            return super().submit(fn, *args)
        self.calls.append(args)
        future = Future()
        future.set_exception(OSError("the worker crashed"))
        return future


def test_errors_of_an_engine_are_deaths_of_workers():
    executor = Fails([0, 1])
    assert_equal(fit(ee.fleet.fit, PLAIN, executor), fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL))
    assert len(executor.calls) == 3 + 2
    with pytest.warns(UserWarning, match=r"without the members 0, 1, 2: their workers died(?s:.)*OSError: the worker"):
        found = fit(ee.fleet.fit, PLAIN | {"retries": 1}, Fails([0, 2, 3]), workers=1)
    assert np.asarray(found.ensemble.ids).tolist() == [3, 4, 5, 6]


def test_processes_that_are_forked_are_refused(unhooked):
    make = lambda: ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    for executor in (make(), make):
        with pytest.raises(ValueError, match=r"this `ProcessPoolExecutor` forks.*\nWrite `ProcessPoolExecutor\(2"):
            fit(ee.fleet.fit, PLAIN, executor)
    check_not_forked(ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")))


class NoCancelFutures(Here):
    """As loky's."""

    def shutdown(self, wait=True):
        self.is_shut = True


def test_what_a_factory_made_is_closed():
    made = []
    make = lambda: made.append(NoCancelFutures()) or made[-1]
    ee.fleet.map_members(make, lambda model: model.layers[0].bias, shard=4)(ENSEMBLE)
    assert [executor.is_shut for executor in made] == [True]


class Open(Here):
    """Notes how many calls were submitted and not done; runs one when it is waited for."""

    def __init__(self):
        super().__init__()
        self.most, self.open = 0, 0

    def submit(self, fn, /, *args):
        self.open += 1
        self.most = max(self.most, self.open)
        future = super().submit(fn, *args)
        future.result = lambda timeout=None: self._done(future)
        return future

    def _done(self, future):
        self.open -= 1
        return Future.result(future)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers(workers):
    """Twice as many shards are open as there are workers, and each gets sixteen if nothing is said."""
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 64, key=KEY)
    executor = Open()
    mean = lambda model: model.bias.mean()
    found = ee.fleet.map_members(executor, mean, workers=workers)(ensemble)
    assert executor.most == 2 * workers
    assert len(executor.calls) == min(16 * workers, 64 // 2)
    np.testing.assert_allclose(found, ee.map_members(mean)(ensemble), rtol=1e-6)


def job(fn, *args):
    return types.SimpleNamespace(result=lambda: fn(*args), done=lambda: True)


class NotAFuture(Here):
    def submit(self, fn, /, *args):
        return job(fn, *args)


WRONG = {
    "an object with `submit` only": (
        types.SimpleNamespace(submit=job),
        "`fleet.fit` needs a `concurrent.futures.Executor`, a function",
    ),
    "one from a function": (lambda: types.SimpleNamespace(submit=job), "must return a `concurrent.futures.Executor`"),
    "not a future": (NotAFuture(), r"`NotAFuture.submit` must return a `concurrent.futures.Future`, got .*Namespace"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_executor(unhooked, name):
    executor, text = WRONG[name]
    with pytest.raises(TypeError, match=text) as caught:
        fit(ee.fleet.fit, PLAIN, executor)
    assert "subclass of `concurrent.futures.Executor`" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1.5, True])
def test_a_wrong_number_of_workers(unhooked, workers):
    with pytest.raises((TypeError, ValueError), match="`workers`"):
        fit(ee.fleet.fit, PLAIN, Here(), workers=workers)


def on_mesh(call, *args, mesh, members=8, **options):
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), members, key=KEY)
    return call(
        *args, ensemble, mse, OPTIMISER, (X, Y), epochs=2, batch_size=8, plan=SEQUENTIAL, mesh=mesh, key=KEY, **options
    )


class TestWorkersWithAMesh:
    """A device has more members in one `fit` than in a shard."""

    @pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_shards_are_one_fit(self, devices):
        make = lambda: ee.make_mesh(members=devices)
        expected = on_mesh(ee.fit, mesh=make(), members=4 * devices)
        found = on_mesh(ee.fleet.fit, Here(), mesh=make, members=4 * devices, shard=2 * devices)
        assert_equal(found, expected)

    @pytest.mark.slow
    def test_rows_over_devices(self):
        """Gradients are summed over devices: within rounding of those of one device, and equal to one mesh."""
        make = lambda: ee.make_mesh(members=2, data=2)
        expected, found = on_mesh(ee.fit, mesh=make()), on_mesh(ee.fleet.fit, Here(), mesh=make, shard=4)
        assert_equal(found, expected)
        alone = on_mesh(ee.fit, mesh=None)
        np.testing.assert_allclose(found.history.loss, alone.history.loss, rtol=1e-5)

    @pytest.mark.slow
    def test_processes(self, monkeypatch):
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")  # of the workers, which inherit it
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            found = on_mesh(ee.fleet.fit, pool, mesh=ee.make_mesh, members=16, shard=8)  # two on each device
        assert_equal(found, on_mesh(ee.fit, mesh=ee.make_mesh(), members=16))

    def test_what_is_refused(self, unhooked):
        with pytest.raises(TypeError, match=r"those of a mesh made here are this process's.\nPass `mesh=ee.make_mesh`"):
            on_mesh(ee.fleet.fit, Here(), mesh=ee.make_mesh())
        with pytest.raises(TypeError, match="needs `mesh` to be a function, got 4"):
            on_mesh(ee.fleet.fit, Here(), mesh=4)
        with pytest.raises(TypeError, match="needs a `jax.sharding.Mesh` as `mesh`, got an int") as caught:
            on_mesh(ee.fleet.fit, Here(), mesh=lambda: 4, shard=4)
        assert "running the members 0, 1, 2, 3 on a worker" in "\n".join(caught.value.__notes__)


class NoWorkers(Executor):
    """A client of Dask whose worker comes after it has been asked `asked` times for workers."""

    def __init__(self, asked):
        self.scheduler = types.SimpleNamespace(address="tcp://here:1")
        self.futures, self.left = [], asked

    def get_executor(self, *, pure):
        assert pure is False
        return self

    def submit(self, fn, /, *args):
        future = Future()
        self.futures.append((future, fn, args))
        return future

    def scatter(self, arrays):
        return arrays

    def nthreads(self):
        self.left -= 1
        if self.left > 0:
            return {}
        waiting, self.futures = self.futures, []
        for future, fn, args in waiting:
            future.set_result(fn(*args))
        return {"tcp://here:2": 1}


def test_dask_without_workers_warns_once_and_waits(monkeypatch):
    monkeypatch.setattr(_engines, "_MOST_WITHOUT_WORKERS", 0.04)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(ee.fleet.fit, PLAIN, _engines.Dask(NoWorkers(20), workers=8))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1
    assert "no workers for 0 seconds. Shards wait until workers connect to the scheduler at tcp://here:1." in texts[0]
    assert_equal(found, fit(ee.fit, OPTIONS["plain"], plan=SEQUENTIAL))


def test_dask_whose_worker_is_slow_does_not_warn(monkeypatch):
    monkeypatch.setattr(_engines, "_MOST_WITHOUT_WORKERS", 1.0)
    fit(ee.fleet.fit, PLAIN, _engines.Dask(NoWorkers(3), workers=8))  # a warning is an error here


def test_dask_that_does_not_start_says_why(monkeypatch):
    def fail(**options):
        raise RuntimeError("Nanny failed to start.")

    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    monkeypatch.setattr(distributed, "LocalCluster", fail)
    with pytest.raises(RuntimeError, match="Nanny") as caught:
        fit(ee.fleet.fit, PLAIN, None)
    assert "call it below `if __name__ == '__main__':`" in caught.value.__notes__[0]


class Pool:
    """The ways in which executors end their processes: of Python 3.14, of loky, and of the standard library before."""

    def __init__(self, kind):
        self.ended = []
        process = types.SimpleNamespace(terminate=lambda: self.ended.append("process"))
        if kind == "new":
            self.terminate_workers = lambda: self.ended.append("workers")
        if kind == "old":
            self._processes = {1: process, 2: process}
        if kind == "loky":
            self.shutdown = self._shutdown_of_loky

    def _shutdown_of_loky(self, wait=True, kill_workers=False):
        self.ended.append((wait, kill_workers))

    def shutdown(self, wait=True, *, cancel_futures=False):
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "ended"),
    [("new", ["workers"]), ("old", ["process"] * 2), ("loky", [(False, True)]), ("threads", [])],
)
def test_processes_are_ended(kind, ended, unhooked):
    pool = Pool(kind)
    end_processes(pool)
    assert pool.ended == ended


class Stuck(Here):
    """The second call runs for ever."""

    def submit(self, fn, /, *args):
        if len(self.calls) != 1:
            return super().submit(fn, *args)
        self.calls.append(args)
        future = Future()
        future.set_running_or_notify_cancel()
        return future


def test_shards_that_still_run_when_a_call_ends():
    def fail(report):
        raise OSError("no space left")

    with pytest.warns(UserWarning, match="^1 shard is still running, and the shutdown of the executor waits"):
        with pytest.raises(OSError, match="no space"):
            fit(ee.fleet.fit, PLAIN, Stuck(), on_shard=fail, workers=1)
    with pytest.raises(OSError, match="no space"):
        fit(ee.fleet.fit, PLAIN, Stuck, on_shard=fail, workers=1)  # its executor is ended, without a warning


def test_a_closed_client_of_dask():
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    with distributed.Client(processes=False, n_workers=1, dashboard_address=":0") as client:
        pass
    with pytest.raises(RuntimeError, match="needs a Dask client that is open"):
        fit(ee.fleet.fit, PLAIN, client)


def test_an_executor_that_goes_away_keeps_what_is_done(unhooked):
    """As a Dask cluster whose time is over: asking for its workers raises, and running shards never end."""

    class Leaving(Here):
        asked = 0

        def get_executor(self, *, pure):
            return self

        def submit(self, fn, *args):
            self.nthreads()
            return super().submit(fn, *args)

        def nthreads(self):
            self.asked += 1
            if self.asked > 3:
                raise AttributeError("'NoneType' object has no attribute 'ncores'")
            return {"worker": 1}

    engine = _engines.Dask(Leaving(), workers=None)
    with pytest.warns(UserWarning, match="without the members 4, 5, 6, 7: .*\n.*the Dask cluster does not answer"):
        run = ee.fleet.fit(
            engine, ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=KEY), mse, OPTIMISER, (X, Y), epochs=1,
            shard=2, retries=0, key=KEY,
        )  # fmt: skip
    assert run.ensemble.ids.tolist() == [0, 1, 2, 3]
