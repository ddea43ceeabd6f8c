"""Members that stay in the files of shards are those of one `fit`, whatever was killed on the way."""

import os
import pathlib
import random
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet import _fit
from eqx_ensemble.fleet._folder import check_call_of_folder, load_call
from eqx_ensemble.fleet._worker import use_settings

from ..checkpoint.damage import flip, forge_each
from ..train.test_forged_records import unharmed
from .executors import Here
from .test_fit import ENSEMBLE, KEY, MEMBERS, OPTIMISER, OPTIONS, RATES, SEQUENTIAL, KillsOne, X, Y, adam, fit, mse

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

IDS = np.asarray(ENSEMBLE.ids)
PLAIN = OPTIONS["plain"] | {"plan": SEQUENTIAL}
# Bootstraps, hyper-parameters, scores of each member, limits of each, and one member that diverges.
RICH = {
    "optimiser": adam,
    "hyper": {"rate": jnp.array([0.1, 1e30, *[0.1] * 5])},
    "epochs": 3,
    "validation": (X[:9], Y[:9]),
    "stop": ee.train.Stopping(target=0.01, steps=np.arange(MEMBERS) + 2),
    "plan": SEQUENTIAL,
    "shuffle": "shared",
    "data": (ee.Each(np.stack([X + i for i in range(MEMBERS)])), Y),
}


def save(folder, options=PLAIN, executor=None, **more):
    return fit(ee.fleet.fit, options | {"shard": 3} | more, executor or Here(), save=folder)


def leaves(tree):
    found = jax.tree.leaves(jax.tree.map(lambda x: x, tree))
    return [np.asarray(x) for x in found if hasattr(x, "dtype")]


def assert_same(found, expected):
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def edited_net(factor):
    """An ensemble of a class whose call has this factor."""
    names = {"eqx": eqx, "jax": jax, "__name__": "own_model"}
    exec(
        f"class Net(eqx.Module):\n  w: jax.Array\n  def __call__(self, x): return ({factor} * self.w @ x)[None]", names
    )
    return ee.build(lambda key: names["Net"](jax.random.normal(key, (3,))), 4, key=KEY)


MODEL = """
import equinox as eqx, jax, jax.numpy as jnp

SCALES = {"a": 2.0}

class Net(eqx.Module):
    layer: eqx.nn.Linear
    name: str = eqx.field(static=True, default="net")
    kinds = ("a", "b", "c")

    def __init__(self, key):
        self.layer = eqx.nn.Linear(3, 1, key=key)

    def __call__(self, x):
        return SCALES[self.kinds[0]] * self.layer(x)

def loss(model, batch, key):
    x, y = batch
    if model.name in {"net", "a", "b"}:
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2) * SCALES["a"]
"""
SCRIPT = """
import sys
from concurrent.futures import Executor, Future
import jax, jax.numpy as jnp, optax
import eqx_ensemble as ee
import own_model
from own_model import Net

class Here(Executor):
    calls, folder_exists = 0, __import__("os").path.exists("run")
    def submit(self, fn, /, *args):
        future = Future()
        if self.calls and not self.folder_exists:
            sys.exit(3)
        self.calls += 1
        future.set_result(fn(*args))
        return future

class Loss:
    factor = 1.0
    def __call__(self, model, batch, key):
        return self.factor * own_model.loss(model, batch, key)

def loss(model, batch, key):
    return Loss()(model, batch, key)

key = jax.random.key(0)
data = jnp.ones((8, 3)), jnp.ones(8)
schedule = optax.cosine_decay_schedule(0.1, 10)
run = ee.fleet.fit(
    Here(), ee.build(Net, 4, key=key), loss, optax.adam(schedule), data, steps=1, batch_size=8, shard=2, save="run",
    key=key,
)
print("complete", run)
"""


class TestFit:
    def test_members(self, sharded_run, whole_run):
        run, expected = sharded_run, whole_run
        assert isinstance(run, ee.fleet.ShardedRun)
        assert run.ids.tolist() == IDS.tolist()
        assert run.missing.size == 0
        assert run.lost == ()
        ensemble = run.load()
        assert jax.tree.structure(ensemble) == jax.tree.structure(expected.ensemble)
        assert_same(ensemble, expected.ensemble)
        assert "ShardedRun of 7 members in 3 files" in repr(run)
        ee.concatenate([run.load(ids=[0]), ENSEMBLE[[1]]])  # functions are the same objects

    @pytest.mark.filterwarnings("ignore:.*diverged")
    def test_columns(self, tmp_path):
        expected, run = fit(ee.fit, RICH), save(tmp_path / "run", RICH)
        for name in ("status", "stopped_at", "fault", "best_step", "best_score"):
            np.testing.assert_array_equal(getattr(run, name), getattr(expected, name))
            assert getattr(run, name).dtype.kind == getattr(expected, name).dtype.kind
        for ranking in ({}, {"by": run.best_score, "mode": "max"}):
            assert_same(run.best(3, **ranking), expected.best(3, **ranking))
        with pytest.raises(ValueError, match="`fleet.ShardedRun.best` "):
            run.best(7)
        found, table = run.table(), expected.table()
        assert [*found] == [*table]
        for name in table:
            np.testing.assert_array_equal(found[name], table[name])
        assert run.healthy_ids.tolist() == [0, 2, 3, 4, 5, 6]
        opened = ee.fleet.open_run(tmp_path / "run", ENSEMBLE[:2])
        for name, values in run.table().items():
            np.testing.assert_array_equal(opened.table()[name], values)
        assert_same(opened.load(), expected.ensemble)

    def test_little_comes_home(self, tmp_path):
        executor = Sizes()
        save(tmp_path / "run", executor=executor)
        saved, executor = executor.sizes, Sizes()
        fit(ee.fleet.fit, PLAIN, executor, shard=3)
        assert max(saved) < min(executor.sizes) / 4


class Sizes(Here):
    """Counts the bytes of results."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def submit(self, fn, /, *args):
        future = super().submit(fn, *args)
        self.sizes.append(len(future.result()))
        return future


class TestRepeated:
    def test_a_complete_folder(self, sharded_run, whole_run):
        run, expected = sharded_run, whole_run
        executor = Here()
        again = save(run.folder, executor=executor, shard=None)
        assert executor.calls == []
        assert_same(again.load(), expected.ensemble)

    def test_after_a_kill(self, tmp_path, whole_run, monkeypatch):
        """The caller dies at any shard: its workers have saved what they did."""
        expected = whole_run
        for killed in range(3):
            folder, executor = tmp_path / str(killed), Dies(killed)
            with pytest.raises(SystemExit):
                save(folder, executor=executor)
            executor = Here()
            run = save(folder, executor=executor)
            assert len(executor.calls) == 3 - killed
            assert_same(run.load(), expected.ensemble)

    def test_a_worker_that_could_not_answer(self, tmp_path, whole_run, monkeypatch):
        """It saved its shard and died: the next try reads it, and trains nothing."""
        from eqx_ensemble.fleet import _fit_shard

        expected = whole_run
        made, trained, original = [], [], _fit_shard.fit_here
        monkeypatch.setattr(_fit_shard, "fit_here", lambda *args, **more: trained.append(1) or original(*args, **more))

        def make():
            made.append(Mute(first=not made))
            return made[-1]

        reports = []
        run = save(tmp_path / "run", executor=make, on_shard=reports.append)
        assert_same(run.load(), expected.ensemble)
        assert len(made) > 1
        assert len(trained) == 3
        assert max(report.attempts for report in reports) > 1

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"epochs": 3}, "`epochs`: saved 2, now 3"),
            ({"key": jax.random.key(1)}, "`key`"),
            ({"loss": lambda model, batch, key: 2 * mse(model, batch, key)}, "`loss`"),
            ({"optimiser": optax.adam(1e-3)}, "`optimiser`"),
            ({"data": (X, Y + 1)}, "`data\\[1\\]`"),
            ({"hyper": RATES, "optimiser": adam}, "`hyper"),
            ({"data": lambda ids: (X, Y)}, "`data`: saved without it"),
            ({"shard": 7}, "whose shards have up to 3 members"),
        ],
    )
    def test_another_call(self, sharded_run, changed, text):
        run = sharded_run
        with pytest.raises(ValueError, match=text):
            save(run.folder, **changed)

    @pytest.mark.parametrize(
        ("setting", "value", "text"),
        [
            ("jax_enable_x64", None, "`jax_enable_x64`: saved"),
            ("jax_threefry_partitionable", None, "`jax_threefry_partitionable`: saved"),
            ("jax_numpy_dtype_promotion", "standard", "`jax_numpy_dtype_promotion`: saved strict, now standard"),
            ("jax_default_prng_impl", "rbg", "`jax_default_prng_impl`: saved threefry2x32, now rbg"),
        ],
    )
    def test_other_settings_of_jax(self, sharded_run, setting, value, text):
        value = not getattr(jax.config, setting) if value is None else value
        with use_settings({setting: value}), pytest.raises(ValueError, match=text):
            save(sharded_run.folder)

    @pytest.mark.parametrize(
        ("change", "compared"), [({"jax_default_matmul_precision": "highest"}, True), ({"jax": "0.0.1"}, False)]
    )
    def test_other_conditions(self, sharded_run, change, compared):
        """Only other versions of libraries make functions incomparable."""
        now = load_call(sharded_run.folder).record
        saved = now._replace(conditions=now.conditions | change)
        edited = now._replace(texts=now.texts | {"loss": "mse 0"})
        with pytest.warns(UserWarning, match=f"saved under other conditions .*{'' if compared else 'cannot be comp'}"):
            check_call_of_folder(saved, now, "a")
        warns = pytest.warns(UserWarning, match="saved under other conditions")
        with pytest.raises(ValueError, match="`loss`") if compared else warns:
            check_call_of_folder(saved, edited, "a")

    def test_lists_for_arrays(self, identity_of):
        given = {
            "hyper": {"rate": np.full(MEMBERS, 0.1)},
            "rows": np.arange(9 * MEMBERS).reshape(MEMBERS, 9) % len(X),
            "stop": ee.train.Stopping(target=np.full(MEMBERS, 0.01), steps=np.full(MEMBERS, 2)),
        }
        options = {"optimiser": adam, "validation": (X[:9], Y[:9])} | PLAIN
        expected = identity_of(options | given)
        assert identity_of(options | jax.tree.map(np.ndarray.tolist, given)) == expected
        assert identity_of(options | given | {"stop": ee.train.Stopping(steps=3)}) != expected

    def test_a_call_that_failed(self, tmp_path):
        """It completed no shard: the corrected call replaces it."""

        def loss(model, batch, key):
            raise ZeroDivisionError

        folder, options = tmp_path / "run", {"steps": 1, "plan": SEQUENTIAL, "loss": loss}
        for size in (8, 9):
            with pytest.raises(ZeroDivisionError):
                save(folder, options | {"batch_size": size})
            assert load_call(folder).record.texts["batch_size"] == str(size)

    def test_defaults_in_words(self, identity_of):
        defaults = {
            "has_aux": False, "history": "all", "shuffle": True, "stop": None, "on_diverge": "freeze",
            "trainable": eqx.is_inexact_array, "hyper": None,
        }  # fmt: skip
        expected = identity_of(PLAIN)
        assert identity_of(PLAIN | defaults) == expected
        for other in ({"has_aux": True}, {"history": 1}, {"shuffle": "shared"}, {"trainable": eqx.is_array}):
            assert identity_of(PLAIN | other).keys() ^ expected.keys() == other.keys()

    def test_data_that_fit_refuses(self, tmp_path):
        with pytest.raises(TypeError, match="`fleet.fit` needs arrays in its data"):
            save(tmp_path / "run", {"data": (X.tolist(), Y.tolist()), "epochs": 1})

    def test_another_ensemble(self, sharded_run):
        run = sharded_run
        other = ee.stack([ENSEMBLE[0]] * MEMBERS)
        with pytest.raises(ValueError, match="`ensemble`: not the same"):
            ee.fleet.fit(
                Here(), other, mse, OPTIMISER, (X, Y), batch_size=8, epochs=2, save=run.folder, plan=SEQUENTIAL, key=KEY
            )

    @pytest.mark.slow
    def test_other_code_of_the_model(self, tmp_path):
        """The arrays of the members are the same."""
        before, after = edited_net("1.0"), edited_net("2.0")
        call = lambda ensemble, executor=None: ee.fleet.fit(
            executor or Here(), ensemble, mse, OPTIMISER, (X, Y), steps=1, batch_size=8, shard=2, save=tmp_path / "run",
            plan=SEQUENTIAL, key=KEY,
        )  # fmt: skip
        with pytest.raises(SystemExit):
            call(before, Dies(1))
        with pytest.raises(ValueError, match="`the members' code`: Ensemble, not the same"):
            call(after)
        assert call(edited_net("1.0")).missing.size == 0

    @pytest.mark.slow
    def test_in_another_process(self, tmp_path):
        """Code of a script and of a module is the same when it is imported again, and different after an edit."""
        (tmp_path / "own_model.py").write_text(MODEL)
        (tmp_path / "script.py").write_text(SCRIPT)

        def run():
            call = [sys.executable, "script.py"]
            paths = f"{tmp_path}{os.pathsep}{os.getcwd()}"
            done = subprocess.run(
                call, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
            )
            return f"{done.returncode} {done.stdout}{done.stderr}"

        assert run().startswith("3 "), "killed after one shard"
        assert run().startswith("0 complete")
        (tmp_path / "own_model.py").write_text(MODEL.replace("2.0", "20.0"))
        assert "`loss`: loss, not the same as saved\n  `the members' code`" in run()

    def test_another_shard_of_it(self, sharded_run, tmp_path):
        run = sharded_run
        folder = tmp_path / "run"
        save(folder, epochs=1)
        shutil.rmtree(folder / "shard-000001")
        shutil.copytree(run.folder / "shard-000001", folder / "shard-000001")
        with pytest.raises(ValueError, match="belongs to a different call"):
            ee.fleet.open_run(folder, ENSEMBLE)

    def test_under_the_name_of_another(self, tmp_path):
        run = save(tmp_path / "run", epochs=1)
        shutil.rmtree(run.folder / "shard-000002")
        shutil.copytree(run.folder / "shard-000001", run.folder / "shard-000002")
        for call in (lambda: save(run.folder, epochs=1), lambda: ee.fleet.open_run(run.folder, ENSEMBLE)):
            with pytest.raises(ValueError, match="it holds `shard-000001` of this call under another name"):
                call()
        with pytest.raises(ValueError, match="shard-000002` holds members .*, and the run needs"):
            run.load()  # of a run that was open when the folder changed

    def test_in_use(self, sharded_run):
        run = sharded_run
        from eqx_ensemble.checkpoint._engine import lock_folder

        with lock_folder(run.folder), pytest.raises(BlockingIOError):
            save(run.folder)

    def test_with_checkpoints(self, tmp_path, whole_run):
        expected = whole_run
        options = {"executor": Here(kills=[1]), "checkpoint": tmp_path / "checkpoints"}
        with pytest.warns(UserWarning, match="without the members.*\n.*\nRerun the same call to resume"):
            save(tmp_path / "run", **options)
        assert_same(save(tmp_path / "run", **options | {"executor": Here()}).load(), expected.ensemble)


@pytest.fixture
def identity_of(monkeypatch, tmp_path):
    """The texts that identify a call, without running it."""

    def stop(call, executor, folder, checkpoints, identity, *_, **__):
        raise StopIteration(identity)

    def find(options):
        with pytest.raises(StopIteration) as stopped:
            save(tmp_path / "run", options)
        return stopped.value.value.texts

    monkeypatch.setattr(_fit, "save_shards", stop)
    return find


class Dies(Here):
    """The caller is killed when it collects a shard, after its worker saved it."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def submit(self, fn, /, *args):
        if len(self.calls) == self.number:
            raise SystemExit
        return super().submit(fn, *args)


class Mute(Here):
    """Runs the first call, and breaks before it answers."""

    def __init__(self, *, first):
        super().__init__()
        self.first = first

    def submit(self, fn, /, *args):
        if self.first and not self.calls:
            fn(*args)
            self.kills = [0]
        return super().submit(fn, *args)


class TestLost:
    def test_a_shard_that_kills(self, tmp_path, whole_run):
        expected = whole_run
        reports, folder = [], tmp_path / "run"
        kills = lambda: KillsOne(IDS[[3, 4]])
        with pytest.warns(UserWarning, match="without the members 3, 4: their workers died"):
            run = save(folder, executor=kills, retries=1, on_shard=reports.append)
        assert run.missing.tolist() == [3, 4]
        assert [shard.ids.tolist() for shard in run.lost] == [[3, 4]]
        assert "a worker died" in str(run.lost[0].error)
        assert_same(run.load(), expected.ensemble[[0, 1, 2, 5, 6]])
        with pytest.raises(ValueError, match=r"not in this run: 9\n  in incomplete shards: 3"):
            run.load(ids=[0, 3, 9])
        assert ee.fleet.open_run(folder, ENSEMBLE).missing.tolist() == [3, 4]
        mean = ee.fleet.predict(Here(), run, X, combine=ee.combine.mean)
        np.testing.assert_allclose(mean, ee.predict(run.load(), X, combine=ee.combine.mean), rtol=1e-5)
        assert_same(save(folder).load(), expected.ensemble)
        lost = [report for report in reports if report.error is not None]
        assert [report.ids.tolist() for report in lost] == [[3, 4]]
        assert np.isnan(lost[0].seconds)

    def test_nothing_done(self, tmp_path):
        from concurrent.futures import BrokenExecutor

        with pytest.raises(BrokenExecutor):
            save(tmp_path / "run", executor=Here(kills=[0]))
        with pytest.raises(ValueError, match="at least one complete shard"):
            ee.fleet.open_run(tmp_path / "run", ENSEMBLE)

    def test_a_file_in_the_place_of_the_folder(self, tmp_path, unhooked):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            NotADirectoryError, match=r"cannot save in the .*folder `.*file`: Not a directory.\nNothing"
        ):
            save(tmp_path / "file")

    def test_interrupted_on_the_worker(self, tmp_path, whole_run):
        """Ctrl-C reaches the processes of a pool too, where `fit` returns the run so far: it is not saved."""
        expected = whole_run
        calls = []

        from eqx_ensemble.fleet import _fit_shard

        original = _fit_shard.fit_here

        def early(*args, **options):
            import equinox as eqx

            run = original(*args, **options)
            calls.append(1)
            return run if len(calls) > 1 else eqx.tree_at(lambda run: run.interrupted, run, replace=True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fit_shard, "fit_here", early)
            with pytest.warns(UserWarning, match="was interrupted"):
                run = save(tmp_path / "run")
        assert run.interrupted
        assert run.missing.tolist() == [0, 1, 2]
        assert_same(save(tmp_path / "run").load(), expected.ensemble)


class TestRead:
    @pytest.mark.parametrize("ids", [[6, 0, 3], [2], [1, 0], range(7), np.array([5, 4, 3, 2])])
    def test_subsets(self, sharded_run, whole_run, ids):
        run, expected = sharded_run, whole_run
        found = run.load(ids=ids)
        assert found.ids.tolist() == list(ids)
        assert_same(found, expected.ensemble[np.asarray(ids)])

    @pytest.mark.slow
    def test_members_in_another_order(self, tmp_path, whole_run):
        order = np.array([5, 1, 6, 0, 3, 2, 4])
        options = PLAIN | {"shard": 3, "batch_size": 8, "key": KEY, "save": tmp_path / "run"}
        run = ee.fleet.fit(Here(), ENSEMBLE[order], mse, OPTIMISER, (X, Y), **options)
        assert run.ids.tolist() == order.tolist()
        assert_same(run.load(ids=[6, 0, 3]), whole_run.ensemble[np.array([6, 0, 3])])

    def test_without_the_ensemble(self, sharded_run, whole_run):
        run, expected = sharded_run, whole_run
        import equinox as eqx

        opened = ee.fleet.open_run(str(run.folder), lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key))
        assert_same(opened.load(ids=[4, 2]), expected.ensemble[np.array([4, 2])])

    @pytest.mark.parametrize(
        ("ids", "error", "text"),
        [
            (3, TypeError, r"Write `ids=\[3\]`"),
            ([1, 1], ValueError, "repeated: 1"),
            ([0.5], TypeError, "integers"),
            ([], TypeError, "at least one"),
            ([-1], ValueError, "not in this run: -1"),
        ],
    )
    def test_wrong_ids(self, sharded_run, unhooked, ids, error, text):
        run = sharded_run
        with pytest.raises(error, match=text):
            run.load(ids=ids)

    def test_wrong_folders(self, sharded_run, tmp_path, unhooked):
        run = sharded_run
        with pytest.raises(FileNotFoundError, match="does not exist"):
            ee.fleet.open_run(tmp_path / "none", ENSEMBLE)
        with pytest.raises(FileNotFoundError, match="holds no run of it"):
            ee.fleet.open_run(tmp_path, ENSEMBLE)
        with pytest.raises(TypeError, match="needs as `like`"):
            ee.fleet.open_run(run.folder, 3)
        with pytest.raises(FileExistsError, match="a single checkpoint written by `ee.save`"):
            save(run.folder / "shard-000000")

    def test_damage(self, sharded_run, tmp_path):
        run = sharded_run
        folder = tmp_path / "run"
        shutil.copytree(run.folder, folder)
        file = next((folder / "shard-000001").glob("arrays-*"))
        data = bytearray(file.read_bytes())
        data[-700] ^= 1
        file.write_bytes(data)
        with pytest.raises(ValueError, match="shard-000001"):
            ee.fleet.open_run(folder, ENSEMBLE).load()


def test_the_best_by_scores_of_which_higher_are_better(tmp_path):
    options = PLAIN | {"validation": ee.train.Validation((X[:9], Y[:9]), score=lambda *args: -mse(*args), mode="max")}
    run = save(tmp_path / "run", options)
    assert run.mode == "max"
    assert_same(run.best(2), fit(ee.fit, options).best(2))
    assert ee.fleet.open_run(run.folder, ENSEMBLE).best().ids.tolist() == run.best().ids.tolist()


@pytest.mark.parametrize("name", ["call/arrays-0001.safetensors", "shard-000002/orbax-0001/weights.bin"])
def test_files_of_the_user_stop_the_call_before_it_trains(name, tmp_path):
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    executor = Here()
    with pytest.raises(FileExistsError, match="is not a checkpoint, so nothing is overwritten"):
        save(tmp_path / "run", executor=executor)
    assert file.read_bytes() == b"mine"
    assert executor.calls == []


def test_changed_metadata_under_a_right_checksum(sharded_run, tmp_path):
    folder = pathlib.Path(shutil.copytree(sharded_run.folder, tmp_path / "run"))
    whole, raised = (sharded_run.table(), sharded_run.load().arrays), []

    def opened():
        run = ee.fleet.open_run(folder, ENSEMBLE)
        return run.table(), run.load().arrays

    for name, record in (("call", "call"), ("shard-000001", "fleet.fit")):
        for change in forge_each(folder / name, random.Random(0), 80, under=("meta", record)):
            raised.append(unharmed(opened, lambda found: assert_same(found, whole), folder, change))
    assert sum(raised) > 50


@pytest.mark.parametrize("name", ["call", "shard-000001"])
def test_a_flipped_bit_in_a_manifest_is_damage(name, sharded_run, tmp_path):
    folder = pathlib.Path(shutil.copytree(sharded_run.folder, tmp_path / "run"))
    file = folder / name / "checkpoint.json"
    data = file.read_bytes()
    for bit in range(0, 8 * 128, 37):
        flip(file, data, bit)
        for call in (lambda: ee.fleet.open_run(folder, ENSEMBLE), lambda: save(folder)):
            with pytest.raises(ee.CheckpointCorruptError, match=f"{name}/checkpoint.json"):
                call()
