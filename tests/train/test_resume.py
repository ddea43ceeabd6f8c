"""Saved runs: the same call resumes bit for bit, whatever ended it; another call raises an error."""

import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Checkpoint, Status, revive
from eqx_ensemble.train import _saver as saver_module
from eqx_ensemble.train._blocks import Crew
from eqx_ensemble.train._saver import Saver

from ..factories import assert_same, grouped
from ..marking import slow_but

KEY = jax.random.key(0)
MEMBERS = 4
ADAM = optax.adam(1e-2)
X = jax.random.normal(KEY, (43, 3))
DATA = X, jnp.sin(X[:, 0])
ROWS = ee.resample.bootstrap(43, MEMBERS, key=KEY)
LRS = {"lr": jnp.array([1e-3, 1e-2, 1e-1, 3e38])}


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)  # so that a stream that started again would be seen
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def loss_with_aux(model, batch, key):
    value = loss(model, batch, key)
    return value, {"twice": 2 * value, "pair": jnp.stack([value, value])}


WEIGHT = 1.0


def weighted(model, batch, key):
    return WEIGHT * loss(model, batch, key)


def by_lr(hyper):
    return optax.adam(hyper["lr"])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


def fitted(begun, *, data=DATA, fn=loss, optimiser=ADAM, **options):
    defaults = {"progress": False, "key": KEY} | ({"batch_size": 8} if data is DATA else {})
    return ee.fit(begun, fn, optimiser, data, **grouped(defaults | options))


def assert_same_run(run, whole):
    for part in ("ensemble", "state", "train_state", "history"):
        assert_same(getattr(run, part), getattr(whole, part))


def assert_resumes(folder, call, every=1):
    """Every file that a run writes is the beginning of the same run."""
    whole, path, done = call(), folder / "all.eqx", []
    save = Saver.save

    def save_and_copy(self, loop):
        save(self, loop)
        done.append(loop.done)
        shutil.copy(path, folder / f"from-{loop.done}.eqx")

    with mock.patch.object(Saver, "save", save_and_copy):
        assert_same_run(call(checkpoint=Checkpoint(path, every=every)), whole)
    assert len(done) > 1
    for step in done[:-1]:
        assert_same_run(call(checkpoint=Checkpoint(folder / f"from-{step}.eqx", every=every)), whole)


OPTIONS = {
    "steps": {"steps": 23},
    "validation": {"epochs": 4, "validation": DATA, "patience": 2},
    "validation, ends within an epoch": {"steps": 21, "validation": DATA},
    "aux": {"epochs": 4, "fn": loss_with_aux, "has_aux": True},
    "means": {"epochs": 4, "fn": loss_with_aux, "has_aux": True, "history": "epochs"},
    "own rows": {"epochs": 4, "rows": ROWS},
    "one order": {"epochs": 4, "shuffle": False},
    "members stop": {"epochs": 4, "stop": ee.train.Stopping(steps=np.array([3, 9, 14, 99]))},
    "diverging": {"epochs": 4, "optimiser": by_lr, "hyper": LRS},
    "reviving": {"epochs": 4, "optimiser": by_lr, "hyper": LRS, "callbacks": revive()},
    "one by one": {"epochs": 3, "plan": ee.plan.Blocks(1)},
    "lbfgs": {"steps": 9, "optimiser": optax.lbfgs(), "shuffle": False},
    "noise": {"steps": 20, "optimiser": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(5)), optax.sgd(0.01))},
}
QUICK = ("validation", "reviving")


class TestTheSameCallGoesOn:
    @pytest.mark.filterwarnings("ignore:.*diverged")
    @pytest.mark.parametrize("name", slow_but(QUICK, OPTIONS))
    def test_from_every_checkpoint(self, ensemble, tmp_path, name):
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, **OPTIONS[name], **more))

    @pytest.mark.slow
    def test_of_stateful_members(self, tmp_path):
        class Model(eqx.Module):
            linear: eqx.nn.Linear
            norm: eqx.nn.BatchNorm

            def __init__(self, key):
                self.linear = eqx.nn.Linear(3, 1, key=key)
                self.norm = eqx.nn.BatchNorm(1, "batch", mode="ema")

            def __call__(self, x, state):
                return self.norm(self.linear(x), state)

        def loss(model, state, batch, key):
            x, y = batch
            out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return jnp.mean((out[:, 0] - y) ** 2), state

        ensemble, state = ee.build(eqx.nn.make_with_state(Model), MEMBERS, key=KEY)
        call = lambda **more: fitted(ensemble, fn=loss, state=state, epochs=3, validation=DATA, **more)
        assert_resumes(tmp_path, call)

    @pytest.mark.slow
    def test_of_a_continued_run(self, ensemble, tmp_path):
        before = fitted(ensemble, steps=7, validation=DATA)
        assert_resumes(tmp_path, lambda **more: fitted(before, steps=16, validation=DATA, **more))

    @pytest.mark.slow
    def test_of_ones_own_state(self, ensemble, tmp_path):
        state = ee.train.init(ensemble, ADAM, key=KEY)
        assert_resumes(tmp_path, lambda **more: fitted(state, steps=16, **more))

    @pytest.mark.slow
    def test_of_long_epochs(self, ensemble, tmp_path, monkeypatch):
        """An epoch of three parts, which are saved too."""
        monkeypatch.setattr("eqx_ensemble.train._fit._LONGEST_PART", 2)
        monkeypatch.setattr(Saver, "offer", lambda self, loop, *, ends: self.save(loop))
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, epochs=3, validation=DATA, **more))

    @pytest.mark.slow
    def test_of_blocks_of_which_members_leave(self, tmp_path):
        members = 16
        ensemble = ee.build(make, members, key=KEY)
        limits = ee.train.Stopping(steps=np.where(np.arange(members) < 12, 6, 30))
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, steps=30, stop=limits, **more), every=2)

    @pytest.mark.slow
    def test_of_a_callback_that_changes_the_state(self, ensemble, tmp_path):
        def halve(state):
            return eqx.tree_at(lambda state: state.hyper["lr"], state, state.hyper["lr"] / 2)

        rates = {"lr": jnp.array([1e-3, 1e-2, 1e-1, 1e-2])}
        options = {"optimiser": by_lr, "hyper": rates, "epochs": 5, "callbacks": ee.train.every(2, halve)}
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, **options, **more))

    def test_after_what_is_finished(self, ensemble, tmp_path, monkeypatch):
        whole = fitted(ensemble, epochs=3, checkpoint=tmp_path / "a")
        monkeypatch.delattr(Crew, "call")  # no step is made
        assert_same_run(fitted(ensemble, epochs=3, checkpoint=tmp_path / "a"), whole)

    def test_where_all_had_stopped(self, ensemble, tmp_path):
        call = lambda: fitted(ensemble, epochs=9, stop=ee.train.Stopping(steps=4), checkpoint=tmp_path / "a")
        assert_same_run(call(), call())

    def test_for_longer(self, ensemble, tmp_path):
        fitted(ensemble, epochs=3, validation=DATA, checkpoint=tmp_path / "a")
        longer = fitted(ensemble, epochs=4, validation=DATA, checkpoint=tmp_path / "a")
        assert_same_run(longer, fitted(ensemble, epochs=4, validation=DATA))

    def test_after_ctrl_c(self, ensemble, tmp_path, monkeypatch, interruptible):
        whole = fitted(ensemble, epochs=6)
        with monkeypatch.context() as patched:
            call = Crew.call

            def interrupted(self, fn, items):
                signal.raise_signal(signal.SIGINT)
                return call(self, fn, items)

            patched.setattr(Crew, "call", interrupted)
            part = fitted(ensemble, epochs=6, checkpoint=tmp_path / "a")
        assert part.interrupted
        assert part.history.loss.shape[1] == 6
        assert_same_run(fitted(ensemble, epochs=6, checkpoint=tmp_path / "a"), whole)

    def test_what_was_raised_is_raised_again(self, ensemble, tmp_path):
        options = {"optimiser": by_lr, "hyper": LRS, "on_diverge": "raise", "checkpoint": tmp_path / "a"}
        with pytest.raises(ee.train.DivergedError) as first:
            fitted(ensemble, steps=20, **options)
        with pytest.raises(ee.train.DivergedError) as again:
            fitted(ensemble, steps=20, **options)
        assert_same_run(again.value.run, first.value.run)

    def test_the_time_before_counts(self, ensemble, tmp_path):
        fitted(ensemble, steps=5, checkpoint=tmp_path / "a")
        meta = ee.contents(tmp_path / "a").meta
        spent = meta["fit"]["seconds"]
        run = fitted(ensemble, steps=10_000, checkpoint=tmp_path / "a", stop=ee.train.Stopping(seconds=spent))
        assert run.status.tolist() == [Status.STOPPED] * MEMBERS
        assert (run.stopped_at < 6 * 100).all()


def listed():
    return [(X[i : i + 8], DATA[1][i : i + 8]) for i in range(0, 40, 8)]


def endless():
    generator = np.random.default_rng(4)
    while True:
        rows = generator.integers(0, len(X), 8)
        yield X[rows], DATA[1][rows]


class TestOverBatches:
    """The batches of the steps that are done are iterated again, and skipped."""

    def test_for_epochs(self, ensemble, tmp_path):
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, data=listed(), epochs=3, validation=DATA, **more))

    @pytest.mark.parametrize("batches", [listed, endless])
    def test_for_steps(self, ensemble, tmp_path, batches, monkeypatch):
        monkeypatch.setattr("eqx_ensemble.train._fit._LONGEST_PART", 4)
        monkeypatch.setattr(Saver, "offer", lambda self, loop, *, ends: self.save(loop))
        assert_resumes(tmp_path, lambda **more: fitted(ensemble, data=batches(), steps=11, **more))

    def test_batches_of_another_shape(self, ensemble, tmp_path):
        fitted(ensemble, data=listed(), steps=5, checkpoint=tmp_path / "a")
        smaller = [(x[:4], y[:4]) for x, y in listed()]
        with pytest.raises(ValueError, match="`loss`: saved"):
            fitted(ensemble, data=smaller, steps=10, checkpoint=tmp_path / "a")


@pytest.fixture(scope="module")
def folder(ensemble, tmp_path_factory):
    """Where a run of ten steps is saved."""
    folder = tmp_path_factory.mktemp("saved") / "a"
    fitted(ensemble, steps=10, validation=DATA, patience=3, checkpoint=folder)
    return folder


class TestAnotherCallIsRefused:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"fn": lambda model, batch, key: 2 * loss(model, batch, key), "score": loss, "mode": "min"}, "loss"),
            ({"score": lambda model, batch, key: 2 * loss(model, batch, key), "mode": "min"}, "score"),
            ({"optimiser": optax.adam(1e-3)}, "optimiser"),
            ({"data": (X + 1, DATA[1]), "batch_size": 8}, "data[0]"),
            ({"validation": (X, DATA[1] + 1)}, "validation[1]"),
            ({"batch_size": 4}, "batch_size"),
            ({"shuffle": False}, "shuffle"),
            ({"rows": ROWS}, "rows"),
            ({"patience": 4}, "patience"),
            ({"min_delta": 0.1}, "min_delta"),
            ({"target": 0.1}, "stop.target"),
            ({"stop": ee.train.Stopping(steps=[1, 2, 3, 4])}, "stop.steps"),
            ({"on_diverge": "raise"}, "on_diverge"),
            ({"history": "epochs"}, "history"),
            ({"trainable": lambda x: eqx.is_inexact_array(x) and x.ndim == 1}, "loss"),
            ({"key": jax.random.key(1)}, "key"),
        ],
    )
    def test_and_the_difference_named(self, ensemble, folder, change, named):
        options = {"steps": 12, "validation": DATA, "patience": 3} | change
        with pytest.raises(
            ValueError, match=rf"this call differs from the one that wrote it(.|\n)*`{re.escape(named)}`: "
        ):
            fitted(ensemble, checkpoint=folder, **options)

    def test_another_ensemble(self, folder):
        other = ee.build(make, MEMBERS, key=jax.random.key(1))
        with pytest.raises(ValueError, match="`weights`: saved [0-9a-f]{64}, now"):
            fitted(other, steps=12, validation=DATA, patience=3, checkpoint=folder)

    def test_another_kind_of_model(self, folder):
        other = ee.build(lambda key: eqx.nn.MLP(3, 1, 9, 1, key=key), MEMBERS, key=KEY)
        with pytest.raises(ValueError, match="`loss`: saved [0-9a-f]{64}, now"):
            fitted(other, steps=12, validation=DATA, patience=3, checkpoint=folder)

    def test_constants_inside_the_loss(self, ensemble, tmp_path):
        def weighted(weights):
            def inner(carry, x):
                return carry + jnp.sum(x * weights), None

            return lambda model, batch, key: loss(model, batch, key) + jax.lax.scan(inner, 0.0, batch[0])[0]

        fitted(ensemble, fn=weighted(np.ones(3, np.float32)), steps=5, checkpoint=tmp_path / "a")
        fitted(ensemble, fn=weighted(np.ones(3, np.float32)), steps=5, checkpoint=tmp_path / "a")
        with pytest.raises(ValueError, match="`loss`: saved [0-9a-f]{64}, now"):
            fitted(ensemble, fn=weighted(np.full(3, 2, np.float32)), steps=5, checkpoint=tmp_path / "a")

    def test_a_global_that_has_changed_since_it_was_compiled(self, ensemble, tmp_path, monkeypatch):
        before = fitted(ensemble, fn=weighted, steps=5).history.loss
        monkeypatch.setitem(globals(), "WEIGHT", 2.0)
        run = fitted(ensemble, fn=weighted, steps=5, checkpoint=tmp_path / "a")
        np.testing.assert_allclose(run.history.loss[:, 0], 2 * before[:, 0], rtol=1e-6)  # two programs round apart
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)
        with pytest.raises(ValueError, match="`loss`: saved [0-9a-f]{64}, now"):
            fitted(ensemble, fn=weighted, steps=5, checkpoint=tmp_path / "a")

    def test_other_hyper_parameters(self, ensemble, tmp_path):
        call = lambda lrs: fitted(
            ensemble, optimiser=by_lr, hyper={"lr": jnp.array(lrs)}, steps=5, checkpoint=tmp_path / "a"
        )
        call([1e-3, 1e-2, 1e-3, 1e-4])
        with pytest.raises(
            ValueError, match=r"`hyper\['lr'\]`: saved float32\[4\] \[.*, 1e-04\], .* now float32\[4\] \[.*, 0.0002\]"
        ):
            call([1e-3, 1e-2, 1e-3, 2e-4])

    def test_fewer_steps_than_are_done(self, ensemble, folder):
        with pytest.raises(ValueError, match=r"has done 10 steps in .*, which is more than this call asks for"):
            fitted(ensemble, steps=9, validation=DATA, patience=3, checkpoint=folder)

    def test_a_file_of_something_else(self, ensemble, tmp_path):
        for meta in (None, {"fit": []}, [1]):
            ee.save(tmp_path / "a", ensemble, meta=meta)
            with pytest.raises(ValueError, match="which holds no run of `fit`"):
                fitted(ensemble, steps=4, checkpoint=tmp_path / "a")

    def test_under_other_versions_it_resumes(self, ensemble, folder, tmp_path, monkeypatch):
        shutil.copy(folder, tmp_path / "a")
        monkeypatch.setattr(saver_module, "versions_text", lambda: "jax 9.9")
        options = {"steps": 12, "validation": DATA, "patience": 3, "checkpoint": tmp_path / "a"}
        with pytest.warns(UserWarning, match=f"written by jax {jax.__version__}.* this is jax 9.9: the last bits may"):
            fitted(ensemble, **options)
        with pytest.raises(ValueError, match="`min_delta`"):
            fitted(ensemble, min_delta=0.5, **(options | {"checkpoint": folder}))


class TestWhenItIsSaved:
    def test_a_minute_without_every(self, ensemble, tmp_path, monkeypatch):
        with mock.patch.object(Saver, "save", autospec=True, side_effect=Saver.save) as saves:
            fitted(ensemble, steps=300, checkpoint=tmp_path / "a")
        assert saves.call_count == 1
        monkeypatch.setattr(saver_module, "_SECONDS_BETWEEN", 0.0)
        monkeypatch.setattr("eqx_ensemble.train._loop._LONGEST_CALL", 0.0)
        with mock.patch.object(Saver, "save", autospec=True, side_effect=Saver.save) as saves:
            fitted(ensemble, steps=300, checkpoint=tmp_path / "b")
        assert saves.call_count > 1

    def test_only_one_run_at_a_time(self, ensemble, tmp_path):
        def begin_again(state):
            with pytest.raises(BlockingIOError, match="Another run uses it"):
                fitted(ensemble, steps=20, checkpoint=tmp_path / "a")

        run = fitted(ensemble, steps=20, checkpoint=tmp_path / "a", callbacks=begin_again)
        assert_same_run(fitted(ensemble, steps=20, checkpoint=tmp_path / "a"), run)


class TestNothingIsLost:
    def test_a_damaged_file_is_named(self, ensemble, tmp_path):
        fitted(ensemble, steps=20, checkpoint=tmp_path / "a")
        data = bytearray((tmp_path / "a").read_bytes())
        data[-40] ^= 1
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(ee.CheckpointCorruptError, match="damaged at"):
            fitted(ensemble, steps=20, checkpoint=tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == data

    def test_a_disk_that_is_full(self, ensemble, tmp_path, monkeypatch):
        whole = fitted(ensemble, steps=20)
        checkpoint = Checkpoint(tmp_path / "a", every=1)
        save = saver_module.save

        def full(path, tree, *, meta):
            if meta["fit"]["done"] > 6:
                raise OSError(28, "No space left on device")
            save(path, tree, meta=meta)

        with monkeypatch.context() as patched:
            patched.setattr(saver_module, "save", full)
            with pytest.raises(OSError, match="No space left on device") as caught:
                fitted(ensemble, steps=20, checkpoint=checkpoint)
        part = caught.value.run
        assert part.history.loss.shape[1] == 12
        np.testing.assert_array_equal(part.history.loss, whole.history.loss[:, : part.history.loss.shape[1]])
        assert saved_step(tmp_path / "a") == 6
        assert_same_run(fitted(ensemble, steps=20, checkpoint=checkpoint), whole)

    def test_a_last_save_that_fails(self, ensemble, tmp_path, monkeypatch):
        whole = fitted(ensemble, steps=20)
        monkeypatch.setattr(saver_module, "save", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left") as caught:
            fitted(ensemble, steps=20, checkpoint=tmp_path / "a")
        assert_same_run(caught.value.run, whole)

    def test_a_file_that_is_not_ours(self, ensemble, tmp_path):
        pathlib.Path(tmp_path / "a").write_text("mine")
        with pytest.raises(ee.CheckpointCorruptError, match="was not written by `save`"):
            fitted(ensemble, steps=4, checkpoint=tmp_path / "a")
        assert pathlib.Path(tmp_path / "a").read_text() == "mine"


def saved_step(path):
    """The last step in a file that another process replaces."""
    return ee.contents(path).meta["fit"]["done"] if path.exists() else 0


@pytest.mark.slow
def test_a_killed_process(tmp_path):
    """A process that is killed in the middle, twice, ends with the bits of one that was not killed."""
    script = [sys.executable, str(pathlib.Path(__file__).with_name("resuming.py"))]
    whole = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert len(whole) == 65
    path = tmp_path / "a"
    for more in (1, 200):
        process = subprocess.Popen([*script, str(path)], stdout=subprocess.PIPE, text=True)
        before = saved_step(path)
        while saved_step(path) < before + more:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        assert process.communicate()[0] == ""
        assert process.returncode == -signal.SIGKILL
    assert 0 < saved_step(path) < 1050
    resumed = subprocess.run([*script, str(path)], check=True, capture_output=True, text=True).stdout
    assert resumed == whole
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
