"""What a search decides follows from the order in which its jobs ended, also of those that were given up."""

import types
from concurrent.futures import BrokenExecutor

import numpy as np
import pytest

from eqx_ensemble.fleet._ladder import Job
from eqx_ensemble.fleet._order import Order
from eqx_ensemble.fleet._shard import Finished

FIRST, SECOND, THIRD = (Job((i, i + 1), 0) for i in (0, 2, 4))
FINISHED = Finished([], [], interrupted=False)
RUN = types.SimpleNamespace(interrupted=False)


def open_order(folder, **call):
    return Order(folder, {"fraction": np.float32(0.5)} | call, name="search")


def take(order):
    """The jobs whose end is next, whether they were done, and whether that was late."""
    return [(turn.job, turn.run is not None, turn.is_late) for turn in iter(order.next, None)]


def test_jobs_that_were_given_up(tmp_path):
    order = open_order(tmp_path)
    for job, run in ((FIRST, None), (SECOND, RUN)):
        order.end(job, run)
        assert take(order) == [(job, run is not None, False)]

    again = open_order(tmp_path)  # the first one is done now, and joins when the others are where they were
    again.end(FIRST, RUN)
    assert take(again) == [(FIRST, False, False)]
    with pytest.raises(ValueError, match="cannot repeat what `.*order.jsonl` lists"):
        again.check_replay(FINISHED)
    again.end(SECOND, RUN)
    assert take(again) == [(SECOND, True, False), (FIRST, True, True)]
    again.check_replay(FINISHED)

    third = open_order(tmp_path)
    third.end(SECOND, RUN)
    assert take(third) == [(FIRST, False, False), (SECOND, True, False)]
    third.end(FIRST, RUN)
    third.end(THIRD, None)
    assert take(third) == [(FIRST, True, True), (THIRD, False, False)]


def test_jobs_that_are_given_up_again(tmp_path):
    open_order(tmp_path).end(FIRST, None)
    order = open_order(tmp_path)
    assert take(order) == []
    order.end(FIRST, None)
    assert take(order) == [(FIRST, False, False)]
    again = open_order(tmp_path)
    again.end(FIRST, None)
    again.end(FIRST, None)
    assert take(again) == [(FIRST, False, False)]
    again.check_replay(FINISHED)


def test_a_job_that_was_done_before(tmp_path):
    order = open_order(tmp_path)
    order.end(FIRST, RUN)
    assert take(order) == [(FIRST, True, False)]
    with pytest.raises(BrokenExecutor, match="a shard that was done before"):
        open_order(tmp_path).end(FIRST, None)


def test_what_is_no_end(tmp_path):
    """A run that was interrupted on its worker, and a line that was cut."""
    order = open_order(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        order.end(FIRST, types.SimpleNamespace(interrupted=True))
    order.end(SECOND, RUN)
    assert take(order) == [(SECOND, True, False)]
    path = tmp_path / "order.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    again = open_order(tmp_path)
    again.end(FIRST, RUN)
    assert take(again) == [(FIRST, True, False)]


def test_another_call(tmp_path):
    open_order(tmp_path)
    with pytest.raises(ValueError, match=r"of another call.\n  fraction: 0.5 there, 0.25 here"):
        open_order(tmp_path, fraction=np.float32(0.25))
