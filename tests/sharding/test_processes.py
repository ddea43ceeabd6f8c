"""Two processes of two devices compute what one process of four does, bit for bit."""

import pathlib

import numpy as np
import pytest

from ..children import finish_together

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).parent / "processes.py"


def results(mode, folder, *, processes):
    """What processes compute that together have four devices."""
    folder.mkdir(exist_ok=True)
    finish_together(SCRIPT, mode, folder, count=processes, DEVICES=str(4 // processes))
    return dict(np.load(folder / "results.npz"))


def same_bits(got, expected):
    assert sorted(got) == sorted(expected)
    assert len(got) > 10
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.slow
def test_the_same_bits(tmp_path):
    two = results("everything", tmp_path / "two", processes=2)
    same_bits(two, results("everything", tmp_path / "one", processes=1))


@pytest.mark.slow
def test_resumed(tmp_path):
    """By two processes, and then by one from their checkpoint of the whole run."""
    whole = results("whole", tmp_path, processes=1)
    same_bits(results("resumed", tmp_path, processes=2), whole)
    same_bits(results("resumed", tmp_path, processes=1), whole)
