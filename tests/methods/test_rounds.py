"""Methods of several runs with `checkpoint`: killed anywhere, the same call ends with the bits of one that was not."""

import pathlib
import random
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
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Checkpoint, NotSavedError
from eqx_ensemble.train.host import _saver
from eqx_ensemble.train.host._loop import Executor, Recording

from . import kills

KEY = jax.random.key(0)
SAVED = ["pbt", "halving", "hyperband"]
METHODS = [pytest.param(name, marks=() if name == "pbt" else pytest.mark.slow) for name in SAVED]


@pytest.fixture(scope="module")
def whole():
    """The digest of a method's result without `checkpoint`, each computed once."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = kills.digest(kills.METHODS[name]())
        return known[name]

    return of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished population."""
    folder = tmp_path_factory.mktemp("saved") / "a"
    kills.pbt(checkpoint=Checkpoint(folder, every=2))
    return folder


def test_cross_fit_sets_the_rows(unhooked):
    with pytest.raises(TypeError, match="`methods.cross_fit` does not take `rows`: each member is trained on"):
        kills.cross_fit(rows=np.zeros((4, 3), int))


class TestKilledAnywhere:
    @pytest.mark.parametrize("name", METHODS)
    def test_at_random_calls_and_saves_again_and_again(self, whole, tmp_path, name):
        moments, save, count = random.Random(0), _saver.save, 0

        def killed_or_save(*arguments, **options):
            if moments.random() < 0.1:
                raise kills.Killed
            save(*arguments, **options)
            if moments.random() < 0.1:
                raise kills.Killed

        while True:
            with mock.patch.object(_saver, "save", killed_or_save), kills.KilledAtCall(moments.randrange(1, 12)):
                try:
                    got = kills.METHODS[name](checkpoint=Checkpoint(tmp_path, every=2))
                    break
                except kills.Killed:
                    count += 1
                    assert count < 100
        assert count > 1
        assert kills.digest(got) == whole(name)

    @pytest.mark.slow
    def test_a_killed_process(self, tmp_path):
        """Real processes, killed at random moments of their training."""
        moments, here = random.Random(0), pathlib.Path(__file__)
        script = [sys.executable, "-m", "tests.methods.kills", "pbt", str(tmp_path / "a")]
        run = lambda: subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=here.parents[2])
        whole = run().communicate()[0]
        shutil.rmtree(tmp_path / "a")
        times = lambda: [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("a/round-*"))]
        for _ in range(2):
            before, process = times(), run()
            while process.poll() is None and times() == before:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.05))
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        assert len(whole) == 65
        assert run().communicate()[0] == whole


class TestTheSameCall:
    @pytest.mark.parametrize("name", METHODS)
    def test_returns_what_is_finished(self, whole, tmp_path, monkeypatch, name):
        call = lambda: kills.METHODS[name](checkpoint=tmp_path / "a")
        assert kills.digest(call()) == whole(name)
        monkeypatch.delattr(Executor, "call")  # no step is made
        assert kills.digest(call()) == whole(name)

    @pytest.mark.parametrize("name", METHODS)
    def test_after_ctrl_c(self, whole, tmp_path, interruptible, monkeypatch, name):
        call = lambda: kills.METHODS[name](checkpoint=Checkpoint(tmp_path / "a", every=2))
        record, left = Recording.report, [3]

        def report(self, steps, members):
            record(self, steps, members)
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(Recording, "report", report)
            part = call()
        run = part[-1] if isinstance(part, list) else part if isinstance(part, ee.Run) else part.run
        assert run.interrupted
        assert kills.digest(part) != whole(name)
        assert kills.digest(call()) == whole(name)

    def test_goes_on_with_more_rounds(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "a")
        longer = kills.pbt(checkpoint=tmp_path / "a", rounds=5)
        assert kills.digest(longer) == kills.digest(kills.pbt(rounds=5))

    def test_keeps_a_file_a_round(self, finished):
        names = sorted(file.name for file in finished.iterdir() if not file.name.startswith("."))
        assert names == ["call.eqx", *(f"round-{i:03d}.eqx" for i in range(4))]

    @pytest.mark.slow
    def test_with_members_that_diverge_and_are_replaced(self, tmp_path):
        def faulty(model, batch, key, hyper):
            return jnp.where(hyper["lr"] > 0.5, jnp.nan, kills.loss(model, batch, key))

        rates = {"lr": jnp.array([0.01, 0.9, 0.02, 0.9, 0.03, 0.04])}
        options = {"rounds": 2, "steps": 3, "hyper": rates, "explore": ee.train.perturb} | kills.OPTIONS
        call = lambda **more: ee.methods.population_based_training(
            kills.ENSEMBLE, faulty, kills.optimiser, kills.DATA, **options, **more
        )
        expected = kills.digest(call())
        with kills.KilledAtCall(2), pytest.raises(kills.Killed):
            call(checkpoint=tmp_path / "a")
        assert kills.digest(call(checkpoint=tmp_path / "a")) == expected

    @pytest.mark.slow
    def test_one_by_one(self, tmp_path):
        call = lambda **more: kills.pbt(plan=ee.plan.Sequential(), **more)
        expected = kills.digest(call())
        with kills.KilledAtCall(3), pytest.raises(kills.Killed):
            call(checkpoint=Checkpoint(tmp_path / "a", every=2))
        assert kills.digest(call(checkpoint=Checkpoint(tmp_path / "a", every=2))) == expected

    @pytest.mark.slow
    def test_on_a_mesh(self, tmp_path):
        ensemble = ee.build(kills.make, 4, key=KEY)
        hyper = ee.sweep.draw(kills.RANGES, 4, key=KEY)
        options = {"hyper": hyper, "rounds": 3, "steps": 4, "mesh": ee.make_mesh(members=4)} | kills.OPTIONS
        call = lambda **more: ee.methods.population_based_training(
            ensemble, kills.loss, kills.optimiser, kills.DATA, **options, **more
        )
        expected = kills.digest(call())
        with kills.KilledAtCall(4), pytest.raises(kills.Killed):
            call(checkpoint=Checkpoint(tmp_path / "a", every=2))
        assert kills.digest(call(checkpoint=Checkpoint(tmp_path / "a", every=2))) == expected

    @pytest.mark.slow
    @jax.numpy_dtype_promotion("standard")  # of Equinox's BatchNorm
    def test_of_stateful_members_and_epochs(self, tmp_path):
        class Model(eqx.Module):
            linear: eqx.nn.Linear
            norm: eqx.nn.BatchNorm

            def __init__(self, key):
                self.linear = eqx.nn.Linear(3, 1, key=key)
                self.norm = eqx.nn.BatchNorm(1, "batch", mode="batch")

            def __call__(self, x, state):
                return self.norm(self.linear(x), state)

        def loss(model, state, batch, key):
            x, y = batch
            out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return jnp.mean((out[:, 0] - y) ** 2), state

        make = eqx.nn.make_with_state(Model)
        options = {"epochs": 4, "factor": 2} | kills.OPTIONS
        call = lambda **more: ee.methods.hyperband(
            make, kills.RANGES, loss, kills.optimiser, kills.DATA, **options, **more
        )
        expected = kills.digest(call())
        for stop in (1, 4, 7):
            with kills.KilledAtCall(stop), pytest.raises(kills.Killed):
                call(checkpoint=Checkpoint(tmp_path / "a", every=3))
        assert kills.digest(call(checkpoint=Checkpoint(tmp_path / "a", every=3))) == expected


class TestNothingIsLost:
    def test_a_damaged_round_is_named(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "a")
        (tmp_path / "a" / "round-002.eqx").write_bytes(b"nothing")
        with pytest.raises(ee.CheckpointCorruptError, match="round-002.eqx` is damaged"):
            kills.pbt(checkpoint=tmp_path / "a")

    @pytest.mark.slow
    def test_a_disk_that_is_full(self, whole, tmp_path, monkeypatch):
        save = _saver.save

        def full(path, tree, *, meta):
            if path.name == "round-002.eqx":
                raise OSError(28, "No space left on device")
            save(path, tree, meta=meta)

        with monkeypatch.context() as patched:
            patched.setattr(_saver, "save", full)
            with pytest.raises(NotSavedError, match="No space left on device") as caught:
                kills.pbt(checkpoint=tmp_path / "a")
        assert caught.value.run.history.loss.shape[1] == 15
        assert kills.digest(kills.pbt(checkpoint=tmp_path / "a")) == whole("pbt")


class TestAnotherCallIsRefused:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"steps": 6}, "`steps`: saved 5, now 6"),
            ({"fraction": 0.5}, "`fraction`: saved 0.34, now 0.5"),
            ({"explore": ee.train.perturb}, r"`hyper\['lr'\]`: saved"),
            ({"hyper": {"lr": kills.HYPER["lr"] * 2}}, r"`hyper\['lr'\]`: saved"),
            ({"validation": (kills.X, kills.DATA[1] + 1)}, r"`validation\[1\]`: saved"),
            ({"batch_size": 4}, "`batch_size`: saved 8, now 4"),
            ({"key": jax.random.key(1)}, "`key`: saved"),
            ({"validation": ee.train.Validation(kills.DATA, score=kills.doubled, mode="min")}, "`score`: saved"),
        ],
    )
    def test_and_the_difference_named(self, finished, change, named):
        with pytest.raises(ValueError, match=f"cannot resume from(.|\n)*{named}"):
            kills.pbt(checkpoint=finished, **change)

    def test_another_loss_optimiser_or_ensemble(self, finished):
        def call(ensemble=kills.ENSEMBLE, loss=kills.loss, optimiser=kills.optimiser, data=kills.DATA):
            own = {"hyper": kills.HYPER, "rounds": 4, "steps": 5, "fraction": 0.34, "explore": kills.EXPLORE}
            options = own | kills.OPTIONS | {"validation": kills.DATA}
            ee.methods.population_based_training(ensemble, loss, optimiser, data, checkpoint=finished, **options)

        call()  # as it was
        for change, named in (
            ({"ensemble": ee.build(kills.make, kills.MEMBERS, key=jax.random.key(1))}, "weights"),
            ({"loss": lambda model, batch, key: 2 * kills.loss(model, batch, key)}, "loss"),
            ({"optimiser": lambda hyper: kills.optimiser({"lr": 2 * hyper["lr"]})}, "optimiser"),
            ({"data": (kills.X + 1, kills.DATA[1])}, r"data\[0\]"),
        ):
            with pytest.raises(ValueError, match=f"cannot resume from(.|\n)*`{named}`: "):
                call(**change)

    @pytest.mark.parametrize(
        ("change", "named"), [({"factor": 3}, "`factor`: saved 2, now 3"), ({"steps": 4}, "`steps`: saved 5, now 4")]
    )
    def test_of_halving(self, tmp_path, change, named):
        kills.halving(checkpoint=tmp_path / "a")
        with pytest.raises(ValueError, match=f"successive_halving` cannot resume from(.|\n)*{named}"):
            kills.halving(checkpoint=tmp_path / "a", **change)

    @pytest.mark.slow
    def test_of_hyperband(self, tmp_path):
        kills.hyperband(checkpoint=tmp_path / "a")
        with pytest.raises(ValueError, match=r"hyperband` cannot resume from(.|\n)*`epochs`: saved 4, now 3"):
            kills.hyperband(checkpoint=tmp_path / "a", epochs=3)

    def test_another_method(self, finished):
        with pytest.raises(ValueError, match="`method`: saved population_based_training, now succ"):
            kills.halving(checkpoint=finished)

    def test_nothing_is_lost_by_asking(self, finished, tmp_path):
        before = {file: file.read_bytes() for file in finished.glob("*.eqx")}
        for change in ({"steps": 6}, {"fraction": 0.5}, {"explore": ee.train.perturb}):
            with pytest.raises(ValueError, match="cannot resume"):
                kills.pbt(checkpoint=finished, **change)
        assert {file: file.read_bytes() for file in finished.glob("*.eqx")} == before


class TestOptions:
    @pytest.mark.parametrize("name", ["pbt", "halving", "hyperband"])
    def test_that_make_no_sense(self, tmp_path, name, unhooked):
        with pytest.raises(TypeError, match="`methods.*needs `checkpoint` to be a path"):
            kills.METHODS[name](checkpoint=3)

    def test_batches_are_refused(self, tmp_path, unhooked):
        with pytest.raises(TypeError, match="takes `checkpoint` with data in arrays, got a list"):
            ee.methods.population_based_training(
                kills.ENSEMBLE, kills.loss, kills.optimiser, [kills.DATA], hyper=kills.HYPER, validation=kills.DATA,
                rounds=2, epochs=1, checkpoint=tmp_path / "a", key=KEY,
            )  # fmt: skip

    def test_a_file(self, tmp_path):
        ee.save(tmp_path / "saved", kills.ENSEMBLE)
        with pytest.raises(NotADirectoryError, match="saves each round in a file of a folder, and"):
            kills.pbt(checkpoint=tmp_path / "saved")
