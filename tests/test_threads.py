"""Compiled functions and paces of runs are kept for the next call, also when several threads ask for them."""

import sys
import threading

import pytest

from eqx_ensemble._compiled import CompiledCall
from eqx_ensemble.plan import Vmap
from eqx_ensemble.train.host import _loop as _pacing

CALL = CompiledCall(lambda read, _: (None, read[0](read[1])), most=2)
FUNCTIONS = [lambda x, i=i: x + i for i in range(3)]


def call_programs(number):
    for _ in range(20):
        for i, fn in enumerate(FUNCTIONS):
            assert CALL((fn, 1.0))[1] == 1.0 + i


def recall_paces(number):
    pacing = _pacing.Pacing(Vmap)
    for turn in range(4000):
        pacing.recall((number, turn % 7))


@pytest.fixture
def impatient():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.parametrize("use", [call_programs, recall_paces])
def test_threads_share_what_is_kept(monkeypatch, impatient, use):
    monkeypatch.setattr(_pacing, "_MOST_KNOWN", 2)
    problems = []

    def run(number):
        try:
            use(number)
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
