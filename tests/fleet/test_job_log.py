"""What a search decides follows from the order in which its jobs ended, also of those that were abandoned."""

import types
from concurrent.futures import BrokenExecutor

import numpy as np
import pytest

from eqx_ensemble.fleet._job_log import JobLog
from eqx_ensemble.fleet._ladder import Job
from eqx_ensemble.fleet._shard import Finished

FIRST, SECOND, THIRD = (Job((i, i + 1), 0) for i in (0, 2, 4))
FINISHED = Finished([], [], interrupted=False)
RUN = types.SimpleNamespace(interrupted=False)


def open_log(folder, **call):
    return JobLog(folder, {"fraction": np.float32(0.5)} | call, name="search")


def take(log):
    """The jobs whose end is next, whether they were done, and whether that was late."""
    return [(turn.job, turn.run is not None, turn.is_late) for turn in iter(log.next, None)]


def test_jobs_that_were_abandoned(tmp_path):
    log = open_log(tmp_path)
    for job, run in ((FIRST, None), (SECOND, RUN)):
        log.end(job, run)
        assert take(log) == [(job, run is not None, False)]

    again = open_log(tmp_path)  # the first one is done now, and joins when the others are where they were
    again.end(FIRST, RUN)
    assert take(again) == [(FIRST, False, False)]
    with pytest.raises(ValueError, match="cannot replay the log `.*order.jsonl`"):
        again.check_replay(FINISHED)
    again.end(SECOND, RUN)
    assert take(again) == [(SECOND, True, False), (FIRST, True, True)]
    again.check_replay(FINISHED)

    third = open_log(tmp_path)
    third.end(SECOND, RUN)
    assert take(third) == [(FIRST, False, False), (SECOND, True, False)]
    third.end(FIRST, RUN)
    third.end(THIRD, None)
    assert take(third) == [(FIRST, True, True), (THIRD, False, False)]


def test_jobs_that_are_abandoned_again(tmp_path):
    open_log(tmp_path).end(FIRST, None)
    log = open_log(tmp_path)
    assert take(log) == []
    log.end(FIRST, None)
    assert take(log) == [(FIRST, False, False)]
    again = open_log(tmp_path)
    again.end(FIRST, None)
    again.end(FIRST, None)
    assert take(again) == [(FIRST, False, False)]
    again.check_replay(FINISHED)


def test_a_job_that_was_done_before(tmp_path):
    log = open_log(tmp_path)
    log.end(FIRST, RUN)
    assert take(log) == [(FIRST, True, False)]
    with pytest.raises(BrokenExecutor, match="a shard that was completed before"):
        open_log(tmp_path).end(FIRST, None)


def test_what_is_no_end(tmp_path):
    """A run that was interrupted on its worker, and a line that was cut."""
    log = open_log(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        log.end(FIRST, types.SimpleNamespace(interrupted=True))
    log.end(SECOND, RUN)
    assert take(log) == [(SECOND, True, False)]
    path = tmp_path / "order.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    again = open_log(tmp_path)
    again.end(FIRST, RUN)
    assert take(again) == [(FIRST, True, False)]


def test_another_call(tmp_path):
    open_log(tmp_path)
    with pytest.raises(ValueError, match=r"a different call.\n  fraction: saved 0.5, now 0.25"):
        open_log(tmp_path, fraction=np.float32(0.25))
