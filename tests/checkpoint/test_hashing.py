"""Checksums computed in other threads are those computed in one, whatever becomes of the threads."""

import hashlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _hashing
from eqx_ensemble.checkpoint._hashing import Digests, fingerprints

DATA = np.random.default_rng(0).bytes(6 * 2**20)


def pieces(data, count):
    return fingerprints(memoryview(data), count)


def digests_of(num_bytes, counts):
    with Digests(num_bytes) as digests:
        return [digests.result(each) for each in [digests.add(memoryview(DATA), count) for count in counts]]


@pytest.mark.parametrize("num_bytes", [0, len(DATA)], ids=["no threads", "threads"])
def test_digests(num_bytes):
    counts = [1, 2, 3, 6, 512, 2**12]
    before = threading.active_count()
    assert digests_of(num_bytes, counts) == [pieces(DATA, count) for count in counts]
    assert threading.active_count() == before


def test_of_nothing():
    with Digests(0) as digests:
        found = digests.result(digests.add(memoryview(b""), 3))
    assert found == [hashlib.sha256().digest()] * 3


def test_threads_do_the_work(monkeypatch):
    seen, worked = set(), threading.Event()
    true = hashlib.sha256

    def noted(data):
        seen.add(threading.current_thread().name)
        worked.set()
        return true(data)

    monkeypatch.setattr(hashlib, "sha256", noted)
    digests = Digests(len(DATA))
    with digests:
        digests.add(memoryview(DATA), 6)
        assert worked.wait(timeout=60)
    assert "eqx_ensemble.digests" in seen


def test_where_no_thread_starts(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert digests_of(len(DATA), [6]) == [pieces(DATA, 6)]


@pytest.mark.parametrize("num_bytes", [0, len(DATA)], ids=["no threads", "threads"])
def test_an_error_of_a_thread_is_raised(monkeypatch, num_bytes):
    def fail(data, count):
        raise MemoryError("no memory for it")

    monkeypatch.setattr(_hashing, "fingerprints", fail)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no memory for it"), Digests(num_bytes) as digests:
        digests.result(digests.add(memoryview(DATA), 6))
    assert threading.active_count() == before


def test_results_in_any_order_while_others_are_added():
    with Digests(len(DATA)) as digests:
        first = [digests.add(memoryview(DATA), count) for count in (1, 512)]
        assert digests.result(first[1]) == pieces(DATA, 512)
        later = digests.add(memoryview(DATA), 8)
        assert digests.result(first[0]) == pieces(DATA, 1)
        assert digests.result(later) == pieces(DATA, 8)


def test_an_error_ends_the_threads():
    before = threading.active_count()

    def write():
        with Digests(len(DATA)) as digests:
            for _ in range(50):
                digests.add(memoryview(DATA), 6)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert threading.active_count() == before


def test_a_large_save_continues_while_python_exits(tmp_path):
    code = (
        "import sys, time, numpy as np, eqx_ensemble as ee\n"
        "from eqx_ensemble.checkpoint._checkpoints import RunFolder\n"
        "finish = RunFolder.finish\n"
        "def later(*args):\n    time.sleep(1)\n    finish(*args)\n"
        "RunFolder.finish = later\n"
        "tree = {'a': np.arange(2**20, dtype=np.int64)}\n"
        "ee.checkpoint.Checkpoints(sys.argv[1], asynchronous=True).save(1, tree)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    tree = {"a": np.zeros(2**20, np.int64)}
    restored = ee.checkpoint.Checkpoints(tmp_path / "run").restore(tree).tree
    np.testing.assert_array_equal(restored["a"], np.arange(2**20))
