"""Members trained in shards are those of one `fit`, bit for bit under `Sequential`, whatever happens to workers."""

import dataclasses
import functools as ft
import importlib
import multiprocessing
import os
import pathlib
import signal
import sys
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import fleet

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 3)).astype(np.float32)  # the last batch of an epoch is smaller
Y = np.sin(X[:, 0])
MEMBERS = 7
NEVER = 99
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


def arrays(run):
    parts = run.ensemble, run.state, run.train_state, run.selection, run.history, run.status, run.stopped_at
    leaves = jax.tree.leaves(eqx.filter((*parts, run.best_step, run.best_score, run.rows), eqx.is_array))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def assert_equal(found, expected):
    assert jax.tree.structure(found.ensemble) == jax.tree.structure(expected.ensemble)
    assert found.fault.tolist() == expected.fault.tolist()
    assert found.revived == expected.revived
    assert not found.interrupted
    for x, y in zip(arrays(found), arrays(expected), strict=True):
        assert x.dtype == y.dtype
        x, y = (z.astype(np.float32) if z.dtype == jnp.bfloat16 else z for z in (x, y))  # NumPy knows no NaN of it
        np.testing.assert_array_equal(x, y)


def fit(call, *args, ensemble=ENSEMBLE, **options):
    options = {"loss": mse, "optimiser": OPTIMISER, "data": (X, Y), "batch_size": 8, "key": KEY} | options
    options.setdefault("plan", ee.plan.Sequential())
    positional = [options.pop(word) for word in ("loss", "optimiser", "data")]
    return call(*args, ensemble, *positional, **options)


@pytest.fixture(scope="module")
def expected():
    return fit(ee.fit, epochs=2)


# Equality with one `fit`.

OPTIONS = {
    "plain": {},
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
        "validation": ee.train.Validation((X[:9], Y[:9]), min_delta=0.01, smooth=0.5),
    },
    "limits of members": {
        "stop": ee.train.Stopping(target=0.01, steps=np.arange(MEMBERS) + 2), "validation": (X[:9], Y[:9]), "epochs": 3,
    },
    "aux, one order": {"loss": noisy, "has_aux": True, "shuffle": "shared"},
    "divergence": {"optimiser": sgd, "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])}},
    "a shard diverges": {
        "optimiser": sgd, "hyper": {"rate": jnp.array([1e30] * 3 + [0.1] * 4)},
        "validation": (X[:9], Y[:9]), "steps": 3,
    },
    "revival": {
        "optimiser": sgd, "hyper": {"rate": jnp.array([0.1, 1e30] * 3 + [0.1])},
        "on_diverge": ee.train.Revive(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key)),
    },
    "batches": {"data": [(X[:8], Y[:8]), (X[8:16], Y[8:16])], "batch_size": None},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("name", OPTIONS)
def test_shards_are_one_fit(name, tmp_path):
    options = ({} if "steps" in OPTIONS[name] else {"epochs": 2}) | OPTIONS[name]
    executor = Here()
    found = fit(fleet.fit, executor, folder=tmp_path, shards=3, **options)
    assert_equal(found, fit(ee.fit, **options))
    assert len(executor.calls) == 3


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_any_number_of_shards(shards, tmp_path, expected):
    with ThreadPoolExecutor(2) as executor:
        assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=shards, epochs=2), expected)


def test_default_plan(tmp_path):
    """Within rounding: another number of members may be another program."""
    found = fit(fleet.fit, Here(), folder=tmp_path, shards=2, epochs=2, plan=None)
    for x, y in zip(arrays(found), arrays(fit(ee.fit, epochs=2, plan=None)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert found.plan.count == 1


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


def test_members_with_a_state(tmp_path):
    build = lambda ids: ee.build(eqx.nn.make_with_state(Normed), ids=ids, key=KEY)
    ensemble, state = build(range(5))
    options = {"loss": stateful_loss, "steps": 4}
    expected = fit(ee.fit, ensemble=ensemble, state=state, **options)
    sharded = {"shards": 2, **options}
    assert_equal(fit(fleet.fit, Here(), ensemble=ensemble, state=state, folder=tmp_path / "a", **sharded), expected)
    found = fit(fleet.fit, Here(), ensemble=build, ids=range(5), folder=tmp_path / "b", **sharded)
    assert_equal(found, expected)


def test_members_and_data_that_workers_make(tmp_path):
    own = np.stack([X + i for i in range(MEMBERS)])
    options = {"epochs": 1, "optimiser": adam, "hyper": RATES}
    expected = fit(ee.fit, data=(ee.Each(own), Y), **options)
    build = lambda ids: ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), ids=ids, key=KEY)
    data = lambda ids: (ee.Each(np.stack([X + i for i in ids])), Y)
    executor, ids = Here(), range(MEMBERS)
    found = fit(fleet.fit, executor, ensemble=build, ids=ids, data=data, folder=tmp_path, shards=3, **options)
    assert_equal(found, expected)
    assert sum(len(x) for args in executor.calls for x in args if isinstance(x, bytes)) < 60_000


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


class Counting(eqx.Module):
    """A linear model with a weight that counts steps: its gradient is -10, the learning rate 0.1."""

    linear: eqx.nn.Linear
    count: jax.Array

    def __call__(self, x):
        return self.linear(x)


COUNTING = ee.build(lambda key: Counting(eqx.nn.Linear(3, 1, key=key), jnp.zeros(())), 5, key=KEY)


def spoilt(model, batch, key, hyper):
    """NaN or infinite after as many steps as `hyper` says, with outputs of three types."""
    value, count = mse(model, batch, key), jax.lax.stop_gradient(model.count)
    fault = jnp.where(count == hyper["nan"], jnp.nan, jnp.where(count == hyper["inf"], jnp.inf, 0.0))
    aux = {"rows": jnp.int32(len(batch[0])), "low": value.astype(jnp.bfloat16), "each": jnp.full(2, value)}
    return value + fault - 10 * model.count, aux


SCORED = {"validation": ee.train.Validation((X, Y), score=mse, mode="min")}
LENGTHS = {  # of members in shards of two, two and one
    "limits": {"stop": ee.train.Stopping(steps=[3, 7, 19, 11, NEVER])},
    "a target": {"stop": ee.train.Stopping(target=1e-9, steps=[3, 7, NEVER, 11, 12])} | SCORED,
    "none to the end": {"stop": ee.train.Stopping(steps=[3, 7, 9, 11, 12])} | SCORED,
    "faults": {"nan": [2, 6, NEVER, NEVER, NEVER], "inf": [NEVER, NEVER, NEVER, 9, 8]},
    "faults and limits": {
        "nan": [2, 6, NEVER, NEVER, 11],
        "stop": ee.train.Stopping(steps=[NEVER, NEVER, 4, 8, NEVER]),
    },
}


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("history", [4, *(pytest.param(some, marks=pytest.mark.slow) for some in ("all", "last"))])
@pytest.mark.parametrize("name", LENGTHS)
def test_histories_of_shards_of_different_lengths(name, history, tmp_path):
    case = dict(LENGTHS[name])
    hyper = {word: np.array(case.pop(word, [NEVER] * 5), np.float32) for word in ("nan", "inf")}
    case |= {"loss": spoilt, "optimiser": optax.sgd(0.1), "hyper": hyper, "has_aux": True, "history": history}
    case |= {"ensemble": COUNTING, "epochs": 4, "data": (X[:21], Y[:21]), "batch_size": 5}
    assert_equal(fit(fleet.fit, Here(), folder=tmp_path, shards=3, **case), fit(ee.fit, **case))


def test_a_divergence_is_told_once_with_its_likely_cause(tmp_path):
    texts, data = [], (np.where(X > X[5, 1], np.nan, X).astype(np.float32), Y)
    for call in (ee.fit, ft.partial(fleet.fit, Here(), folder=tmp_path, shards=3)):
        with pytest.warns(UserWarning, match="The data are not finite, which is a likely cause: ") as caught:
            fit(call, data=data, steps=8)
        texts += [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert len(set(texts)) == 1


# A call that is made again.


def test_finished_shards_are_not_sent_again(tmp_path, expected):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2), expected)
    assert executor.calls == []


def test_more_epochs_go_on(tmp_path):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    found = fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=3)
    assert_equal(found, fit(ee.fit, epochs=3))
    assert len(executor.calls) == 3


def test_another_call_is_refused(tmp_path, unhooked):
    fit(fleet.fit, Here(), folder=tmp_path, shards=3, epochs=2)
    executor = Here()
    with pytest.raises(ValueError, match="loss"):
        fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2, loss=lambda *args: 2 * mse(*args))
    with pytest.raises(
        ValueError, match=r"a folder of this call alone, with `shards=4`; .* holds `shard-00000-of-00003`"
    ):
        fit(fleet.fit, executor, folder=tmp_path, shards=4, epochs=2)
    assert executor.calls == []


class Apart(Here):
    """On a machine that does not see the folder of the caller."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def submit(self, fn, /, *args):
        hidden = self.folder.rename(self.folder.with_name("hidden"))
        try:
            return super().submit(fn, *args)
        finally:
            assert not self.folder.exists()
            hidden.rename(self.folder)


def test_workers_that_do_not_see_the_folder(tmp_path, expected):
    """They return the content of their files, and get that of files to continue."""
    folder = tmp_path / "runs"
    executor = Apart(folder)
    assert_equal(fit(fleet.fit, executor, folder=folder, shards=3, epochs=2), expected)
    files = sorted(folder.glob("shard-*"))
    assert len(files) == 3
    assert sorted(folder.iterdir()) == files
    assert_equal(fit(fleet.fit, executor, folder=folder, shards=3, epochs=2), expected)
    assert len(executor.calls) == 3
    size = files[0].stat().st_size
    assert_equal(fit(fleet.fit, executor, folder=folder, shards=3, epochs=3), fit(ee.fit, epochs=3))
    assert len(executor.calls[0][1]) < size < len(executor.calls[3][1])


# Workers that die.


def test_the_shard_of_a_dead_worker_is_sent_once_more(tmp_path, expected):
    executor = Here(kills=[1])
    assert_equal(fit(fleet.fit, executor, folder=tmp_path, shards=3, epochs=2), expected)
    assert len(executor.calls) == 4
    assert executor.calls[1] != executor.calls[3]  # Dask would give the first answer again


def test_workers_that_die_again(tmp_path, expected):
    text = (
        r"`fleet.fit` lost its workers \(OSError: the worker crashed\) before the end of shard 1 \(members 3 to 4\).\n"
    )
    with pytest.raises(BrokenExecutor, match=text + "Open a new executor if this one is broken, and call again"):
        fit(fleet.fit, Here(kills=[1, 3]), folder=tmp_path, shards=3, epochs=2)
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
        return value + 0 * jax.pure_callback(kill, shape, jax.lax.stop_gradient(value), hyper["rate"])

    return {"loss": loss, "optimiser": sgd, "hyper": {"rate": jnp.array([0.01] * 5 + [0.02] * 2)}, "epochs": 2}


@pytest.mark.slow
def test_a_pool_whose_worker_is_killed(tmp_path):
    """With functions that no other process can import."""
    options = killing(tmp_path)
    sharded = {"folder": tmp_path / "runs", "shards": 3} | options
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool, pytest.raises(BrokenExecutor, match=r"before the end of shard 2 \("):
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


# Errors.


class Odd(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, number, text):
        super().__init__(f"{number} {text}")

    def __reduce__(self):
        return Odd, self.args


@pytest.mark.parametrize(("kind", "found"), [(ZeroDivisionError, "^3 parts"), (Odd, "Odd: 3 parts")])
def test_an_error_on_a_worker(kind, found, tmp_path, expected):
    def data(ids):
        if 3 in ids and not (tmp_path / "mended").exists():
            raise kind(3, "parts") if kind is Odd else kind("3 parts")
        return X, Y

    sharded = {"data": data, "folder": tmp_path / "runs", "shards": 3, "epochs": 2}
    with pytest.raises(RuntimeError if kind is Odd else kind, match=found) as caught:
        fit(fleet.fit, Here(), **sharded)
    notes = "\n".join(caught.value.__notes__)
    assert ", in data\n" in notes + str(caught.value)  # the trace of the worker
    assert "Raised by shard 1 (members 3 to 4). Finished shards are kept: the next call reads them." in notes
    (tmp_path / "mended").touch()
    executor = Here()
    assert_equal(fit(fleet.fit, executor, **sharded), expected)
    assert len(executor.calls) == 1


class Elsewhere(Here):
    """On workers that do not have the file of a module."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def submit(self, fn, /, *args):
        known, text = sys.modules.pop(self.path.stem), self.path.read_text()
        self.path.unlink()
        try:
            return super().submit(fn, *args)
        finally:
            sys.modules[self.path.stem] = known
            self.path.write_text(text)


def test_a_class_that_workers_cannot_import(tmp_path, unhooked, monkeypatch):
    class Local(eqx.nn.Linear):
        pass

    hint = "Classes of Modules are sent by name: define them in a file that workers can import"
    options = {"shards": 2, "steps": 1, "ensemble": ee.build(lambda key: Local(3, 1, key=key), 4, key=KEY)}
    with pytest.raises(TypeError, match=f"(?s)cannot send its arguments to workers: .*Local.*{hint}"):
        fit(fleet.fit, Here(), folder=tmp_path / "a", **options)
    file = tmp_path / "own_models.py"
    file.write_text("import equinox as eqx\nclass Own(eqx.nn.Linear): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_models")
    options["ensemble"] = ee.build(lambda key: own.Own(3, 1, key=key), 4, key=KEY)
    text = f"A worker of `fleet.fit` cannot import what it was sent: No module named 'own_models'.\n{hint}"
    with pytest.raises(ImportError, match=text):
        fit(fleet.fit, Elsewhere(file), folder=tmp_path / "b", **options)
    fit(fleet.fit, Here(), folder=tmp_path / "b", **options)
    del sys.modules["own_models"]


MESH = lambda: ee.make_mesh(members=2)
BUILD = lambda ids: ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), len(ids), key=KEY)
WRONG = {
    "a process pool that forks": (
        {"executor": lambda: ProcessPoolExecutor(1, multiprocessing.get_context("fork"))}, "this executor forks",
    ),
    "callbacks": ({"callbacks": lambda: [print]}, r"does not take `callbacks=.*workers would call them"),
    "a mesh": ({"mesh": MESH}, "does not take `mesh=.*its devices are those of this process"),
    "a checkpoint": ({"checkpoint": lambda: "run"}, "does not take `checkpoint='run'`: each shard has its own"),
    "copies": ({"on_diverge": lambda: "revive"}, "does not take `on_diverge='revive'`: a donor"),
    "copies, perturbed": ({"on_diverge": lambda: ee.train.Revive(perturb=lambda hyper, key: hyper)}, "a donor"),
    "no shards": ({"shards": lambda: 0}, "`shards` of at least 1"),
    "too many shards": ({"shards": lambda: 8}, "at most one shard per member: 7 members, `shards=8`"),
    "no cores": ({"cores": lambda: 0, "plan": lambda: None}, "`count` of at least 1"),
    "no ids": ({"ensemble": lambda: BUILD}, "and the `ids` of all members.*got .* without `ids`"),
    "needless ids": ({"ids": lambda: range(7)}, "got an Ensemble with `ids`"),
    "members of other ids": ({"ensemble": lambda: BUILD, "ids": lambda: [3, 4, 5]}, "with the ids that it gets"),
    "rows of others": ({"rows": lambda: np.zeros((6, 8), int)}, "6|7"),
    "data of others": ({"data": lambda: (ee.Each(np.ones((6, 20, 3))), Y)}, "6|7"),
    "hyper of others": ({"hyper": lambda: {"rate": np.ones(6)}, "optimiser": lambda: adam}, "6|7"),
    "an option that is none": ({"epoch": lambda: 3}, "epoch"),
    "together": ({"optimiser": lambda: ee.train.Together(OPTIMISER, shared=OPTIMISER)}, "independent"),
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


def test_the_number_of_cores(tmp_path):
    plans = [None, ee.plan.Cores(block=4), ee.plan.Cores(count=3)]
    counts = [
        fit(fleet.fit, Here(), folder=tmp_path / str(i), shards=1, steps=1, plan=plan, cores=2).plan.count
        for i, plan in enumerate(plans)
    ]
    assert counts == [2, 2, 3]
    assert dataclasses.replace(plans[1], count=2) == fit(ee.fit, steps=1, plan=ee.plan.Cores(block=4, count=2)).plan
