"""Members trained in shards are those of one `fit`, bit for bit in equal blocks, whatever happens to workers."""

import multiprocessing
import os
import pathlib
import pickle
import signal
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import fleet

from .factories import assert_same
from .marking import slow_but

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 3)).astype(np.float32)
Y = np.sin(X[:, 0])
MEMBERS = 7
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=KEY)
RATES = {"rate": jnp.geomspace(1e-3, 1e-1, MEMBERS)}
OPTIMISER = optax.adam(1e-2)
adam = lambda hyper: optax.adam(hyper["rate"])
sgd = lambda hyper: optax.sgd(hyper["rate"])


class Here(Executor):
    """Runs a call when it is submitted; those whose numbers are in `kills` end as those of a worker that dies."""

    def __init__(self, kills=()):
        self.calls, self.kills = [], kills

    def submit(self, fn, /, *args):
        future = Future()
        self.calls.append(args)
        if len(self.calls) - 1 in self.kills:
            future.set_exception(OSError("the worker crashed"))
        else:
            future.set_result(fn(*args))
        return future


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def noisy(model, batch, key):
    factor = 1 + 0.1 * jax.random.normal(key)
    return mse(model, batch, key) * factor, {"count": jnp.int32(3), "factor": factor}


def assert_equal(found, expected):
    assert jax.tree.structure(found.ensemble) == jax.tree.structure(expected.ensemble)
    assert not found.interrupted
    for part in ("ensemble", "state", "train_state", "history", "rows"):
        assert_same(getattr(found, part), getattr(expected, part))


def fit(call, *args, ensemble=ENSEMBLE, **options):
    options = {"loss": mse, "optimiser": OPTIMISER, "data": (X, Y), "batch_size": 8, "key": KEY} | options
    options.setdefault("plan", ee.plan.Blocks(1))
    positional = [options.pop(word) for word in ("loss", "optimiser", "data")]
    return call(*args, ensemble, *positional, **options)


@pytest.fixture(scope="module")
def expected():
    return fit(ee.fit, epochs=2)


# Equality with one `fit`.

OPTIONS = {
    "hyper and bootstraps": {
        "optimiser": adam, "hyper": {"rate": RATES["rate"].tolist()},
        "rows": ee.resample.bootstrap(37, MEMBERS, key=KEY),
    },
    "own data": {
        "data": (ee.Each(np.stack([X + i for i in range(MEMBERS)])), Y),
        "validation": (ee.Each(np.stack([X[:9] + i for i in range(MEMBERS)])), Y[:9]),
    },
    "patience": {
        "optimiser": adam, "hyper": RATES, "patience": 1, "epochs": 6,
        "validation": ee.train.Validation((X[:9], Y[:9]), min_delta=0.01),
    },
    "limits of members": {
        "stop": ee.train.Stopping(target=0.01, steps=np.arange(MEMBERS) + 2), "validation": (X[:9], Y[:9]), "epochs": 3,
    },
    "aux, one order": {"loss": noisy, "has_aux": True, "shuffle": False},
    "a shard diverges": {
        "optimiser": sgd, "hyper": {"rate": jnp.array([1e30] * 3 + [0.1] * 4)},
        "validation": (X[:9], Y[:9]), "steps": 7,
    },
    "revival": {
        "optimiser": sgd, "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])},
        "callbacks": lambda state: ee.train.revive(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), optimiser=sgd)(state),
    },
    "batches": {"data": [(X[:8], Y[:8]), (X[8:16], Y[8:16])], "batch_size": None},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("name", slow_but(["hyper and bootstraps", "patience"], OPTIONS))
def test_shards_are_one_fit(name, tmp_path):
    options = ({} if "steps" in OPTIONS[name] else {"epochs": 2}) | OPTIONS[name]
    executor = Here()
    found = fit(fleet.fit, executor, folder=tmp_path, shards=3, **options)
    assert_equal(found, fit(ee.fit, **options))
    assert len(executor.calls) == 3


@pytest.mark.parametrize("shards", slow_but([5], [1, 5]))
def test_any_number_of_shards(shards, tmp_path, expected):
    with ThreadPoolExecutor(2) as executor:
        assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=shards, epochs=2), expected)


@pytest.mark.slow
def test_default_plan(tmp_path):
    """Within rounding: another number of members may be another program."""
    found = fit(fleet.fit, Here(), folder=tmp_path, shards=2, epochs=2, plan=None)
    expected = fit(ee.fit, epochs=2, plan=None)
    np.testing.assert_allclose(found.history.loss, expected.history.loss, rtol=1e-4)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def stateful_loss(model, state, batch, key):
    x, y = batch
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)
    return jnp.mean((out[:, 0] - y) ** 2), state


@pytest.mark.slow
def test_members_with_a_state(tmp_path):
    ensemble, state = ee.build(eqx.nn.make_with_state(Normed), 5, key=KEY)
    options = {"ensemble": ensemble, "state": state, "loss": stateful_loss, "steps": 4}
    found = fit(fleet.fit, Here(), folder=tmp_path, shards=2, **options)
    assert_equal(found, fit(ee.fit, **options))


def test_own_keys(tmp_path):
    keys = jax.random.split(KEY, MEMBERS)
    found = fit(fleet.fit, Here(), folder=tmp_path, shards=2, steps=3, key=keys)
    assert_equal(found, fit(ee.fit, steps=3, key=keys))


@pytest.mark.slow
def test_shared_arrays_travel_once_and_own_ones_in_parts(tmp_path):
    x, own = np.tile(X, (1000, 1)), np.zeros((MEMBERS, 1000, 5), np.float32)
    loss = lambda model, batch, key: mse(model, batch[0], key) + batch[1].sum()
    executor = Here()
    fit(
        fleet.fit, executor, loss=loss, data=((x[:1000], x[:1000, 0]), ee.Each(own)), folder=tmp_path, shards=7, steps=1
    )
    common, each = zip(*((args[0], len(args[1])) for args in executor.calls), strict=True)
    assert all(x is common[0] for x in common)
    assert max(each) < 1.5 * own[0].nbytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged")
def test_shards_of_different_lengths(tmp_path):
    """Members of the first shard stop in the first epoch, one of the second diverges in the second."""
    call = {"stop": ee.train.Stopping(steps=[3, 5, 99, 99, 99, 99, 99]), "epochs": 4, "optimiser": sgd}
    call |= {"hyper": {"rate": jnp.array([0.1] * 4 + [1e3] * 3)}, "validation": (X[:9], Y[:9])}
    assert_equal(fit(fleet.fit, Here(), folder=tmp_path, shards=4, **call), fit(ee.fit, **call))


def test_a_divergence_is_told_once(tmp_path):
    hyper = {"rate": jnp.array([0.1] * 5 + [1e30] * 2)}
    with pytest.warns(UserWarning, match="members 5, 6 diverged") as caught:
        fit(fleet.fit, Here(), folder=tmp_path, shards=3, steps=8, optimiser=sgd, hyper=hyper)
    assert len(caught) == 1


# A call that is made again.


def test_finished_shards_are_not_sent_again(tmp_path, expected):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2), expected)
    assert executor.calls == []


@pytest.mark.slow
def test_more_epochs_go_on(tmp_path):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    found = fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=3)
    assert_equal(found, fit(ee.fit, epochs=3))
    assert len(executor.calls) == 3


def test_another_call_is_refused(tmp_path):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    with pytest.raises(ValueError, match="`loss`"):
        fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2, loss=lambda *args: 2 * mse(*args))
    assert executor.calls == []


def test_workers_that_do_not_see_the_folder(tmp_path):
    class Apart(Here):
        def submit(self, fn, /, *args):
            future = super().submit(fn, *args)
            for file in tmp_path.iterdir():
                file.unlink()
            return future

    with pytest.raises(FileNotFoundError, match="needs a `folder` that workers and this process see"):
        fit(fleet.fit, Apart(), folder=tmp_path, shards=3, steps=1)


# Workers that die, and errors.


def test_a_dead_worker(tmp_path, expected):
    with pytest.raises(OSError, match="the worker crashed") as caught:
        fit(fleet.fit, Here(kills=[1]), folder=tmp_path, shards=3, epochs=2)
    assert "From shard 1 of `fleet.fit`. Finished shards are kept" in caught.value.__notes__[0]
    executor = Here()
    assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2), expected)
    assert len(executor.calls) == 1


def killing(folder):
    """The options of a call whose loss kills its process, once, in its sixth step of a shard with member 5."""
    folder = str(folder)

    def kill(value, rate):
        place, count = pathlib.Path(folder, "killed"), int(os.environ.get("EVALUATIONS", "0")) + int(rate > 0.015)
        os.environ["EVALUATIONS"] = str(count)
        if count >= 6 and not place.exists():
            place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def loss(model, batch, key, hyper):
        value = mse(model, batch, key)
        shape = jax.ShapeDtypeStruct((), np.float32)
        return value + 0 * jax.pure_callback(
            kill, shape, jax.lax.stop_gradient(value), hyper["rate"], vmap_method="sequential"
        )

    return {"loss": loss, "optimiser": sgd, "hyper": {"rate": jnp.array([0.01] * 5 + [0.02] * 2)}, "epochs": 2}


@pytest.mark.slow
def test_a_pool_whose_worker_is_killed(tmp_path):
    """With functions that no other process can import."""
    options = killing(tmp_path)
    sharded = {"folder": tmp_path / "runs", "shards": 3} | options
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool, pytest.raises(BrokenExecutor):
        fit(fleet.fit, pool, **sharded)
    with ProcessPoolExecutor(2, context) as pool:
        found = fit(fleet.fit, pool, **sharded)
    assert_equal(found, fit(ee.fit, **options))
    executor = Here()
    assert_equal(fit(fleet.fit, executor, **sharded), found)
    assert executor.calls == []


@pytest.mark.slow
def test_dask_whose_worker_is_killed(tmp_path):
    """Dask sends its shard to another one."""
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    options = killing(tmp_path)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        found = fit(fleet.fit, client, folder=tmp_path / "runs", shards=3, **options)
    assert (tmp_path / "killed").exists()
    assert_equal(found, fit(ee.fit, **options))


@pytest.mark.slow
def test_settings_reach_processes(tmp_path):
    with jax.enable_x64(True), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        options = {"ensemble": ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 4, key=KEY), "steps": 3}
        options["data"] = X.astype(np.float64), Y.astype(np.float64)
        found = fit(fleet.fit, pool, folder=tmp_path, shards=2, **options)
        assert_equal(found, fit(ee.fit, **options))
    assert found.ensemble.stacked.layers[0].weight.dtype == np.float64


class Interrupted(Here):
    """Ctrl-C while the second shard is waited for."""

    def __init__(self):
        super().__init__()
        self.futures = []

    def submit(self, fn, /, *args):
        future = super().submit(fn, *args) if not self.futures else Future()
        if len(self.futures) == 1:
            future.result = self.interrupt
        self.futures.append(future)
        return future

    def interrupt(self):
        raise KeyboardInterrupt


def test_ctrl_c(tmp_path, expected):
    executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2)
    assert [future.cancelled() for future in executor.futures] == [False, True, True]
    again = Here()
    assert_equal(fit(fleet.fit, again, folder=tmp_path, shards=3, epochs=2), expected)
    assert len(again.calls) == 2
    assert {path.name[:6] for path in tmp_path.iterdir()} == {"shard-"}


def test_an_error_on_a_worker(tmp_path):
    """It does not bring the run so far, which is saved."""

    def fail(state):
        if state.hyper["rate"].max() > 0.05 and state.step.max() > 5:
            raise ZeroDivisionError

    options = {"optimiser": adam, "hyper": RATES, "epochs": 2, "callbacks": fail}
    with pytest.raises(ZeroDivisionError) as caught:
        fit(fleet.fit, Here(), folder=tmp_path, shards=3, **options)
    assert not hasattr(caught.value, "run")
    options["callbacks"] = None
    executor = Here()
    assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=3, **options), fit(ee.fit, **options))
    assert len(executor.calls) == 1


def test_a_class_that_workers_cannot_import(tmp_path):
    class Local(eqx.nn.Linear):
        pass

    ensemble = ee.build(lambda key: Local(3, 1, key=key), 4, key=KEY)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="Local"):
        fit(fleet.fit, Here(), ensemble=ensemble, folder=tmp_path, shards=2, steps=1)


WRONG = {
    "a process pool that forks": (
        {"executor": lambda: ProcessPoolExecutor(1, multiprocessing.get_context("fork"))}, "processes that are spawned",
    ),
    "no shards": ({"shards": lambda: 0}, "`shards` of at least 1"),
    "too many shards": ({"shards": lambda: 8}, "at most one shard per member: 7 members, `shards=8`"),
    "rows of others": ({"rows": lambda: np.zeros((6, 8), int)}, "6|7"),
    "data of others": ({"data": lambda: (ee.Each(np.ones((6, 20, 3))), Y)}, "6|7"),
    "hyper of others": ({"hyper": lambda: {"rate": np.ones(6)}, "optimiser": lambda: adam}, "6|7"),
    "together": ({"optimiser": lambda: ee.train.Together(OPTIMISER, shared=OPTIMISER)}, "trains shards apart"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_before_any_worker_begins(name, tmp_path, unhooked):
    given, text = WRONG[name]
    options = {"executor": Here(), "folder": tmp_path, "shards": 3, "epochs": 1}
    options |= {word: make() for word, make in given.items()}
    executor = options.pop("executor")
    with pytest.raises((TypeError, ValueError), match=text):
        fit(fleet.fit, executor, **options)
    assert getattr(executor, "calls", []) == []
