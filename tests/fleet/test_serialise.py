"""Functions that return are the caller's own, and what refers to itself can be sent."""

import jax
import numpy as np
import pytest

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

from eqx_ensemble.fleet._serialise import dumps, loads, refs_of  # noqa: E402
from eqx_ensemble.fleet._worker import Task, _read_task  # noqa: E402


def both(value, **options):
    return loads(dumps(value, name="test"), **options)


def test_functions_come_back():
    scale = 3.0
    local = lambda x: scale * x
    assert both([local, local])[0] is local
    assert both(jax.nn.relu) is jax.nn.relu
    assert both(np.sum) is np.sum


def test_a_function_that_changed_is_another():
    values = [1.0]
    local = lambda: values[0]
    before = dumps(local, name="test")
    values[0] = 2.0
    assert dumps(local, name="test") != before


def test_functions_that_refer_to_each_other():
    def first(x):
        return second(x - 1) if x else 0

    def second(x):
        return first(x - 1) if x else 1

    found = both({"first": first, "second": second})
    assert found["first"] is first
    assert found["second"](3) == second(3)


def test_arrays_in_place_of_their_numbers():
    array = np.arange(1000.0)
    data = dumps({"x": array, "y": 3}, refs_of([array]), name="test")
    assert len(data) < 200
    assert loads(data, [array])["x"] is array


def test_shards_of_a_call_share_their_task():
    """What compiled programs are found by, such as a combination, is one object on a worker."""
    array, other = np.arange(1000.0), np.ones(1000)
    task = dumps(Task(max, {"combine": object(), "data": array}), refs_of([array]), name="test")
    assert _read_task(task, [array]) is _read_task(task, [array])
    assert _read_task(task, [other])[1]["data"] is other
    assert _read_task(task, [array])[1]["data"] is array
