"""A signal saves a run and ends the program with a code that means "again"; the same program then resumes."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import Checkpoints, exit_on_signal
from eqx_ensemble.train.host._loop import Recording

from ..methods import kills


def fitted(**options):
    optimiser = kills.optimiser
    return ee.fit(kills.ENSEMBLE, kills.loss, optimiser, kills.DATA, hyper=kills.HYPER, **(kills.OPTIONS | options))


@pytest.fixture
def signalled(monkeypatch):
    """A function that has a signal come after the first chunks of a run."""
    record = Recording.report

    def at(chunk, number=signal.SIGTERM, times=1):
        left = [chunk]

        def report(self, steps, members):
            record(self, steps, members)
            left[0] -= 1
            for _ in range(times if left[0] == 0 else 0):
                signal.raise_signal(number)

        monkeypatch.setattr(Recording, "report", report)

    yield at
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class TestARunThatIsSaved:
    def test_ends_at_the_next_boundary_and_resumes(self, tmp_path, signalled):
        whole = fitted(steps=12)
        signalled(2)
        call = lambda: fitted(steps=12, checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3))
        after = []

        def main():
            with exit_on_signal():
                after.append(call())

        with pytest.raises(SystemExit) as caught:
            main()
        assert (caught.value.code, after) == (75, [])
        assert 0 < Checkpoints(tmp_path / "a").steps[-1] < 12
        assert not (tmp_path / "a" / "fit.lock").exists()
        with exit_on_signal():
            run = call()
        assert kills.digest(run) == kills.digest(whole)

    @pytest.mark.slow
    def test_of_a_method(self, tmp_path, signalled):
        signalled(5)
        call = lambda: kills.pbt(checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3))
        with pytest.raises(SystemExit) as caught, exit_on_signal(signal.SIGUSR1, code=3), exit_on_signal():
            call()
        assert caught.value.code == 75
        assert sorted(path.name for path in tmp_path.glob("a/round-*"))[-1] > "round-000000"
        assert kills.digest(call()) == kills.digest(kills.pbt())

    @pytest.mark.slow
    def test_another_signal_and_code(self, tmp_path, signalled):
        signalled(1, signal.SIGUSR1)
        with pytest.raises(SystemExit) as caught, exit_on_signal(signal.SIGUSR1, code=3):
            fitted(steps=12, checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3))
        assert caught.value.code == 3
        assert Checkpoints(tmp_path / "a").steps

    @pytest.mark.slow
    def test_a_second_signal_does_not_wait(self, tmp_path, signalled):
        signalled(2, times=2)
        with pytest.raises(SystemExit), exit_on_signal():
            fitted(steps=60, checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=60))
        assert not Checkpoints(tmp_path / "a").steps

    def test_in_another_thread(self, tmp_path, signalled):
        begun, ended = [], []
        call = lambda: fitted(
            steps=2000, checkpoint=ee.checkpoint.Checkpoints(tmp_path / "a", every=3), callbacks=begun.append
        )
        thread = threading.Thread(target=lambda: ended.append(call()))

        def main():
            with exit_on_signal():
                thread.start()
                while not begun:
                    time.sleep(0.001)
                signal.raise_signal(signal.SIGTERM)
                thread.join()

        with pytest.raises(SystemExit):
            main()
        assert ended[0].interrupted
        assert Checkpoints(tmp_path / "a").steps[-1] == ended[0].train_state.step < 2000


class TestOtherwise:
    def test_it_ends_at_once(self, signalled):
        after = []

        def main():
            with exit_on_signal():
                signal.raise_signal(signal.SIGTERM)
                after.append(1)

        with pytest.raises(SystemExit) as caught:
            main()
        assert (caught.value.code, after) == (75, [])

    def test_a_run_that_is_not_saved_ends_at_once(self, signalled):
        signalled(1)
        with pytest.raises(SystemExit), exit_on_signal():
            fitted(steps=12)

    def test_nothing_changes(self, signalled):
        with exit_on_signal():
            run = fitted(steps=12)
        assert not run.interrupted
        np.testing.assert_array_equal(run.history.loss, fitted(steps=12).history.loss)

    def test_what_is_caught_is_raised_at_the_end(self, signalled):
        def main():
            with exit_on_signal(), contextlib.suppress(SystemExit):
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(SystemExit):
            main()

    @pytest.mark.parametrize("number", [signal.SIGKILL, 0, 99, True, "TERM"])
    def test_refused_signals(self, number, unhooked):
        with pytest.raises(ValueError, match=r"`checkpoint.exit_on_signal` needs a signal that a program can handle"):
            exit_on_signal(number).__enter__()

    @pytest.mark.parametrize("code", [0, 256, "75", True])
    def test_refused_codes(self, code, unhooked):
        with pytest.raises(ValueError, match="an exit code from 1 to 255"):
            exit_on_signal(code=code).__enter__()

    def test_refused_in_another_thread(self):
        errors = []

        def run():
            try:
                exit_on_signal().__enter__()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert errors == ["`checkpoint.exit_on_signal` needs the main thread, which alone receives signals."]


@pytest.mark.slow
def test_a_machine_that_is_taken_away(tmp_path):
    """SIGTERM, and SIGKILL twenty seconds later, as schedulers do; until the program says that it is done."""
    root = pathlib.Path(__file__).parents[2]
    script = [sys.executable, "-m", "tests.methods.kills", "pbt", str(tmp_path / "a"), "1200"]
    codes, seconds = [], []
    while not codes or codes[-1] == 75:
        process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=root)
        before = sorted(tmp_path.glob("a/round-*/step-*"))
        while len(codes) < 2 and process.poll() is None and sorted(tmp_path.glob("a/round-*/step-*")) == before:
            time.sleep(0.001)
        started = time.monotonic()
        if len(codes) < 2:
            process.terminate()
        try:
            printed, _ = process.communicate(timeout=20 if len(codes) < 2 else 300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        seconds.append(time.monotonic() - started)
        codes.append(process.returncode)
    assert codes == [75, 75, 0]
    assert max(seconds[:2]) < 20
    assert printed.strip() == kills.digest(kills.pbt(steps=1200))
