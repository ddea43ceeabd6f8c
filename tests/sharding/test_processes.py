"""Two processes of two devices compute what one process of four does, bit for bit; one that dies ends the other."""

import pathlib
import shutil
import time

import numpy as np
import pytest

from ..children import finish_together, together

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).parent / "processes.py"


def results(mode, folder, *, processes, devices=4):
    """What processes compute that together have so many devices."""
    folder.mkdir(exist_ok=True)
    finish_together(SCRIPT, mode, folder, count=processes, DEVICES=str(devices // processes))
    return dict(np.load(folder / "results.npz"))


def same_bits(got, expected, *, but_for=()):
    assert sorted(got) == sorted(expected)
    assert len(got) > 10
    for name, x in got.items():
        if not name.startswith(tuple(but_for)):
            np.testing.assert_array_equal(x, expected[name], err_msg=name)
        elif x.dtype.kind == "f":  # sums over four devices in two processes are added in another order
            np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_same_bits(tmp_path):
    """Members spread, rows split, batches read in parts, members that leave: as in one process."""
    two = results("everything", tmp_path / "two", processes=2)
    one = results("everything", tmp_path / "one", processes=1)
    same_bits(two, one, but_for=("1x4",))


def test_eight_devices(tmp_path):
    assert len(results("eight", tmp_path / "eight", processes=1, devices=8)) > 100


def test_callbacks(tmp_path):
    """All processes see the same, stop at the same step, and end when a callback of one of them raises an error."""
    two = results("called", tmp_path / "two", processes=2)
    same_bits(two, results("called", tmp_path / "one", processes=1))
    assert two["stopped_at"].tolist() == [-1, -1, 2, -1, 4, -1, -1, -1]


def test_a_process_that_dies(tmp_path):
    """The other ends with an error in bounded time; the job resumes with two processes, with one, and on one device."""
    whole = results("training", tmp_path / "whole", processes=2)
    folder = tmp_path / "killed"
    folder.mkdir()
    with together(SCRIPT, "dying", folder, DEVICES="2") as (first, second):
        assert second.finish(300)[0] == -9
        died = time.monotonic()
        code, *texts = first.finish(90)
    assert time.monotonic() - died < 60, "it has to notice that no process answers"
    assert code != 0
    text = "".join(texts)
    assert "process" in text.lower() or "gloo" in text.lower(), text
    assert not (folder / "results.npz").exists()
    assert (folder / "run.eqx").exists(), "nothing was saved before it died"
    for name, options in {
        "two": {"processes": 2},
        "one": {"processes": 1},
        "alone": {"processes": 1, "devices": 1},
    }.items():
        shutil.copytree(folder, tmp_path / name)
        got = results("training", tmp_path / name, **options)
        same_bits(got, whole, but_for=() if name != "alone" else ("",))
