"""Methods of several runs with `checkpoint`: killed anywhere, the same call ends with the bits of one that was not."""

import itertools
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints
from eqx_ensemble.checkpoint._checkpoints import RunFolder
from eqx_ensemble.methods import _rounds
from eqx_ensemble.train import NotSavedError
from eqx_ensemble.train.host._loop import Executor, Recording
from eqx_ensemble.train.resume import _identity

from ..checkpoint import faults
from ..factories import assert_same
from . import kills

KEY = jax.random.key(0)
METHODS = [pytest.param(name, marks=() if name == "pbt" else pytest.mark.slow) for name in kills.METHODS]
MANY = [pytest.param(name, 8, marks=pytest.mark.slow) for name in kills.METHODS]
MANY += [pytest.param(name, 250, marks=pytest.mark.exhaustive) for name in kills.METHODS]


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
    kills.pbt(checkpoint=ee.checkpoint.Checkpoints(folder, every=2))
    return folder


def rounds_in(folder):
    return sorted(int(path.name[-6:]) for path in folder.glob("round-*"))


def test_cross_fit_sets_the_rows(unhooked):
    with pytest.raises(TypeError, match="`methods.cross_fit` does not take `rows`: each member is trained on"):
        kills.cross_fit(rows=np.zeros((4, 3), int))


class TestKilledAnywhere:
    @pytest.mark.parametrize(("name", "fewest"), [("pbt", 1), *MANY])
    def test_at_random_operations_again_and_again(self, whole, tmp_path, name, fewest):
        call, total = kills.METHODS[name], 0
        for seed in itertools.count(fewest):
            folder = tmp_path / str(seed)
            contexts = kills.random_kills(seed, faults)
            saved = lambda: call(checkpoint=ee.checkpoint.Checkpoints(folder, every=2))  # noqa: B023
            got, count = kills.finish_with_kills(saved, faults.Killed, contexts)
            assert kills.digest(got) == whole(name)
            total += count
            if total >= fewest:
                break

    @pytest.mark.slow
    @pytest.mark.parametrize("how", faults.HOWS)
    def test_at_every_operation_between_two_rounds(self, whole, tmp_path, how):
        """From the last step of the first round to the first one of the second."""
        call = lambda folder: kills.pbt(checkpoint=folder, rounds=2, steps=5)
        expected = kills.digest(kills.pbt(rounds=2, steps=5))
        with faults.Layer() as layer:
            call(tmp_path / "all")
        stops = range(faults.HOWS.index(how), layer.count, 9)
        assert layer.count > 40
        for stop in stops:
            with faults.Layer(stop=stop, how=how), pytest.raises(faults.Killed):
                call(tmp_path / str(stop))
            kills._worker._unseen.clear()
            assert kills.digest(call(tmp_path / str(stop))) == expected

    @pytest.mark.slow
    def test_a_killed_process(self, tmp_path):
        """Real processes, killed at random moments of their training."""
        moments, here = random.Random(0), pathlib.Path(__file__)
        script = [sys.executable, "-m", "tests.methods.kills", "pbt", str(tmp_path / "a")]
        run = lambda: subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=here.parents[2])
        whole = run().communicate()[0]
        shutil.rmtree(tmp_path / "a")
        killed = 0
        for _ in range(2):
            process = run()
            before = sorted(tmp_path.glob("a/**/step-*"))
            while process.poll() is None and sorted(tmp_path.glob("a/**/step-*")) == before:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.05))
            process.kill()
            process.communicate()
            killed += process.returncode == -signal.SIGKILL
        assert killed == 2
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
        call = lambda: kills.METHODS[name](checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))
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

    def test_keeps_two_rounds(self, finished):
        assert rounds_in(finished) == [2, 3]
        assert Checkpoints(finished / "decisions").steps == [2, 3]
        assert not list(finished.glob("**/fit.lock"))

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
        with kills.KilledAtCall(2, faults.Killed), pytest.raises(faults.Killed):
            call(checkpoint=tmp_path / "a")
        assert kills.digest(call(checkpoint=tmp_path / "a")) == expected

    @pytest.mark.slow
    def test_where_explore_draws_anew(self, tmp_path):
        """What was decided before a round that is saved is read, not decided again."""
        explore = lambda hyper, key: {"lr": float(hyper["lr"]) * np.random.uniform(0.5, 2)}  # noqa: NPY002
        call = lambda: kills.pbt(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2), explore=explore)
        with kills.KilledAtCall(8, faults.Killed), pytest.raises(faults.Killed):
            call()
        decisions = Checkpoints(tmp_path / "a" / "decisions")
        (before,) = decisions.steps[-1:]
        got = call()
        empty = lambda x: np.empty((before, *x.shape[1:]), x.dtype)
        like = jax.tree.map(empty, {"scores": got.scores, "lineage": got.lineage, "hyper": got.hyper})
        assert 1 <= before < 3
        assert_same(decisions.restore(like, step=before).tree["hyper"]["lr"], got.hyper["lr"][:before])
        assert kills.digest(call()) == kills.digest(got)

    @pytest.mark.slow
    def test_one_by_one(self, tmp_path):
        call = lambda **more: kills.pbt(plan=ee.plan.Sequential(), **more)
        expected = kills.digest(call())
        with kills.KilledAtCall(3, faults.Killed), pytest.raises(faults.Killed):
            call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))
        assert kills.digest(call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))) == expected

    @pytest.mark.slow
    def test_on_a_mesh(self, tmp_path):
        ensemble = ee.build(kills.make, 4, key=KEY)
        hyper = ee.sweep.draw(kills.RANGES, 4, key=KEY)
        options = {"hyper": hyper, "rounds": 3, "steps": 4, "mesh": ee.make_mesh(members=4)} | kills.OPTIONS
        call = lambda **more: ee.methods.population_based_training(
            ensemble, kills.loss, kills.optimiser, kills.DATA, **options, **more
        )
        expected = kills.digest(call())
        with kills.KilledAtCall(4, faults.Killed), pytest.raises(faults.Killed):
            call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))
        assert kills.digest(call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))) == expected

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
            with kills.KilledAtCall(stop, faults.Killed), pytest.raises(faults.Killed):
                call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3))
        assert kills.digest(call(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3))) == expected


class TestNothingIsLost:
    @pytest.mark.slow
    def test_damaged_checkpoints_of_a_round(self, whole, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "a")
        for arrays in (tmp_path / "a" / "round-000003").glob("step-*/*.safetensors"):
            arrays.write_bytes(b"nothing")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.warns(UserWarning, match="resumes from the round before `round-000003`: all checkpoints"):
                again = kills.pbt(checkpoint=tmp_path / "a")
        assert kills.digest(again) == whole("pbt")

    def test_damaged_decisions(self, whole, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "a")
        for arrays in (tmp_path / "a" / "decisions" / "step-000000000003").glob("*.safetensors"):
            arrays.write_bytes(b"nothing")
        with pytest.warns(UserWarning, match="resumes from the round before `round-000003`: all checkpoints"):
            again = kills.pbt(checkpoint=tmp_path / "a")
        assert kills.digest(again) == whole("pbt")

    @pytest.mark.slow
    def test_all_is_damaged(self, finished, tmp_path):
        shutil.copytree(finished, tmp_path / "a")
        shutil.rmtree(tmp_path / "a" / "round-000002")
        for arrays in (tmp_path / "a" / "round-000003").glob("step-*/*.safetensors"):
            arrays.write_bytes(b"nothing")
        with pytest.raises(ee.CheckpointCorruptError, match="All checkpoints in"):
            kills.pbt(checkpoint=tmp_path / "a")

    @pytest.mark.slow
    def test_a_disk_that_is_full(self, whole, tmp_path, monkeypatch):
        finish = RunFolder.finish

        def full(self, step, *rest):
            if self.step_path(0).parent.name == "decisions" and step == 2:
                raise OSError(28, "No space left on device")
            finish(self, step, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "finish", full)
            with pytest.raises(NotSavedError, match="No space left on device") as caught:
                kills.pbt(checkpoint=tmp_path / "a")
        assert caught.value.run.history.loss.shape[1] == 10
        assert kills.digest(kills.pbt(checkpoint=tmp_path / "a")) == whole("pbt")

    @pytest.mark.slow
    def test_files_of_others_in_an_old_round(self, whole, tmp_path):
        with kills.KilledAtCall(2, faults.Killed), pytest.raises(faults.Killed):
            kills.pbt(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))
        (tmp_path / "a" / "round-000000" / "note").write_text("mine")
        with pytest.warns(UserWarning, match="an earlier round could not be removed"):
            again = kills.pbt(checkpoint=tmp_path / "a")
        assert kills.digest(again) == whole("pbt")
        assert (tmp_path / "a" / "round-000000" / "note").read_text() == "mine"


class TestAnotherCallIsRefused:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"rounds": 5}, "`rounds`: saved 4, now 5"),
            ({"steps": 6}, "`steps`: saved 5, now 6"),
            ({"fraction": 0.5}, "`fraction`: saved 0.34, now 0.5"),
            ({"explore": ee.train.perturb}, "`explore`: saved .*explore, now perturb"),
            ({"hyper": {"lr": kills.HYPER["lr"] * 2}}, r"`hyper\['lr'\]`: saved"),
            ({"validation": (kills.X, kills.DATA[1] + 1)}, r"`validation\[1\]`: saved"),
            ({"batch_size": 4}, "`batch_size`: saved 8, now 4"),
            ({"key": jax.random.key(1)}, "`key`: saved"),
            ({"validation": ee.train.Validation(kills.DATA, score=kills.doubled, mode="min")}, "`score`: not the"),
        ],
    )
    def test_and_the_difference_named(self, finished, change, named):
        with pytest.raises(ValueError, match=f"population_based_training` cannot resume from(.|\n)*{named}"):
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
        with kills.KilledAtCall(2, faults.Killed), pytest.raises(faults.Killed):
            kills.halving(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=2))
        with pytest.raises(ValueError, match=f"successive_halving` cannot resume from(.|\n)*{named}"):
            kills.halving(checkpoint=tmp_path / "a", **change)

    @pytest.mark.slow
    def test_of_hyperband(self, tmp_path):
        kills.hyperband(checkpoint=tmp_path / "a")
        with pytest.raises(ValueError, match=r"hyperband` cannot resume from(.|\n)*`epochs`: saved 4, now 3"):
            kills.hyperband(checkpoint=tmp_path / "a", epochs=3)
        with pytest.raises(ValueError, match=r"successive_halving` cannot resume|holds checkpoints|differs"):
            kills.halving(checkpoint=tmp_path / "a" / "bracket-000000")

    def test_another_method(self, finished):
        with pytest.raises(ValueError, match="`method`: saved methods.population_based_training, now methods.succ"):
            kills.halving(checkpoint=finished)

    def test_under_other_versions_it_resumes(self, finished, tmp_path, monkeypatch):
        shutil.copytree(finished, tmp_path / "a")
        conditions = _identity.conditions
        monkeypatch.setattr(_identity, "conditions", lambda **settings: conditions(**settings) | {"jax": "9.9"})
        monkeypatch.setattr(_rounds, "function_text", lambda fn, *args: "another digest")
        with pytest.warns(UserWarning, match="will not be the same bit for bit"):
            kills.pbt(checkpoint=tmp_path / "a")
        with pytest.raises(ValueError, match="`rounds`"):
            kills.pbt(checkpoint=tmp_path / "a", rounds=3)


class TestOptions:
    @pytest.mark.parametrize("name", ["pbt", "halving", "hyperband"])
    def test_that_make_no_sense(self, tmp_path, name, unhooked):
        call = kills.METHODS[name]
        for options, error, message in (
            ({"checkpoint": 3}, TypeError, "needs `checkpoint` to be a path"),
            (
                {"checkpoint": Checkpoints(tmp_path / "a", resume="must")},
                FileNotFoundError,
                "must resume, and found no",
            ),
        ):
            with pytest.raises(error, match=f"`methods.*{message}"):
                call(**options)
        assert not list(tmp_path.iterdir())

    def test_never(self, finished):
        with pytest.raises(FileExistsError, match="must not resume, and .* holds checkpoints"):
            kills.pbt(checkpoint=ee.checkpoint.Checkpoints(finished, resume="never"))

    def test_another_fit(self, finished):
        before = sorted(path.name for path in finished.iterdir())
        with pytest.raises(ValueError, match="cannot resume from .* with another `fit`"):
            kills.pbt(checkpoint=finished, fit=lambda *args, **options: ee.fit(*args, **options))
        assert sorted(path.name for path in finished.iterdir()) == before

    def test_another_fit_that_saves_as_that_of_this_library_resumes(self, tmp_path):
        own = lambda *args, **options: ee.fit(*args, **options)
        first, again = (kills.halving(checkpoint=tmp_path / "a", fit=own) for _ in range(2))
        assert kills.digest(again) == kills.digest(first)

    def test_batches_are_refused(self, tmp_path, unhooked):
        with pytest.raises(TypeError, match="takes `checkpoint` with data in arrays, got a list"):
            ee.methods.population_based_training(
                kills.ENSEMBLE, kills.loss, kills.optimiser, [kills.DATA], hyper=kills.HYPER, validation=kills.DATA,
                rounds=2, epochs=1, checkpoint=tmp_path / "a", key=KEY,
            )  # fmt: skip

    def test_folders_of_others(self, tmp_path):
        ee.save(tmp_path / "saved", kills.ENSEMBLE)
        with pytest.raises(FileExistsError, match="is a single checkpoint written by `save`"):
            kills.pbt(checkpoint=tmp_path / "saved")
        Checkpoints(tmp_path / "run").save(1, kills.ENSEMBLE)
        with pytest.raises(FileExistsError, match="holds the checkpoints of one run"):
            kills.pbt(checkpoint=tmp_path / "run")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(FileExistsError, match="is not a checkpoint"):
            kills.pbt(checkpoint=tmp_path / "file")

    @pytest.mark.slow
    def test_one_process_at_a_time(self, tmp_path):
        def again(hyper, key):
            with pytest.raises(BlockingIOError, match="in use: by process"):
                kills.pbt(checkpoint=tmp_path / "a")
            return kills.EXPLORE(hyper, key)

        # `explore` is called once before anything is locked, when nothing refuses.
        calls = itertools.count()
        kills.pbt(
            checkpoint=tmp_path / "a",
            rounds=2,
            explore=lambda hyper, key: again(hyper, key) if next(calls) > 1 else kills.EXPLORE(hyper, key),
        )
        assert next(calls) > 2
