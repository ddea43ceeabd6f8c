"""The record of the call that a folder belongs to: how it is written, and compared with another call."""

import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.checkpoint._call_folder import (
    CallRecord,
    check_same_call,
    child,
    children,
    conditions,
    has_call,
    read_call,
    write_call,
)
from eqx_ensemble.methods._rounds import Rounds

from . import faults

CALL = CallRecord({"loss": "mse 0", "steps": "3"}, ("loss",), {"jax": "1", "backend": "cpu"})
ARRAYS = {"ids": np.arange(3, dtype=np.int32), "sizes": np.array([2, 1])}


def changed(texts=(), conditions=()):
    return CALL._replace(texts=CALL.texts | dict(texts), conditions=CALL.conditions | dict(conditions))


def compare(saved, now, **options):
    check_same_call(saved, now, "a", effect="bits differ", **options)


def test_equal_calls():
    compare(CALL, CallRecord(*CALL))
    with pytest.raises(ValueError, match=r"from `a`: (.|\n)*\n  `loss`: saved mse 0, now mse 1\n  `steps`: saved 3, "):
        compare(CALL, changed({"loss": "mse 1", "steps": "4"}))


def test_other_versions_make_code_incomparable_and_nothing_else():
    later = changed({"loss": "mse 1"}, {"jax": "2"})
    with pytest.warns(UserWarning, match=r"\(jax 1 -> 2\): bits differ, and functions cannot be compared"):
        compare(CALL, later)
    with pytest.raises(ValueError, match="it.\n  `steps`: saved 3, now 4\n"):  # without a warning that it resumes
        compare(CALL, later._replace(texts=later.texts | {"steps": "4"}))
    gpu = {"backend": "gpu"}
    with pytest.warns(UserWarning, match=r"\(backend cpu -> gpu\): bits differ.$"):
        compare(CALL, changed((), gpu), harmless=("backend",))
    with pytest.raises(ValueError, match="`loss`: saved mse 0, now mse 1"):
        compare(CALL, changed({"loss": "mse 1"}, gpu), harmless=("backend",))


@pytest.mark.parametrize("saved", [True, False])
def test_a_function_that_one_call_lacks_is_a_difference_under_any_version(saved):
    more = changed({"score": "f 0"}, {"jax": "2"})._replace(code=("loss", "score"))
    both = (more, CALL) if saved else (CALL, more)
    with pytest.raises(ValueError, match="`score`: saved with"):
        compare(*both)


def test_settings_are_conditions():
    found = conditions(x64="False")
    assert found["jax"] == jax.__version__
    assert (found["backend"], found["x64"]) == ("cpu", "False")
    assert not {"python", "numpy"} & {*found}


def test_a_call_is_read_as_it_was_written(tmp_path):
    assert not has_call(tmp_path)
    write_call(tmp_path, CALL, ARRAYS)
    assert has_call(tmp_path)
    record, arrays = read_call(tmp_path)
    assert record == CALL
    assert record.digest == CALL.digest != changed({"steps": "4"}).digest
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_a_checkpoint_of_the_user_is_no_call(tmp_path):
    ee.save(tmp_path / "call", ARRAYS, meta={"note": 1})
    assert read_call(tmp_path) == (CallRecord({}, (), {}), {})


def test_a_call_of_another_function_is_refused(tmp_path):
    write_call(tmp_path, CALL, {})
    with pytest.raises(ValueError, match="`steps`: saved with it, now without it"):
        Rounds(tmp_path, own={}, name="methods.x")


@pytest.mark.parametrize("how", faults.HOWS)
def test_a_call_that_is_killed_while_it_is_replaced(tmp_path, how):
    other = changed({"steps": "4"})
    write_call(tmp_path / "all", CALL, ARRAYS)
    with faults.Layer() as layer:
        write_call(tmp_path / "all", other, {})
    assert layer.count > 5
    seen = set()
    for stop in range(layer.count):
        folder = tmp_path / str(stop)
        write_call(folder, CALL, ARRAYS)
        with faults.Layer(stop=stop, how=how), pytest.raises(faults.Killed):
            write_call(folder, other, {})
        record, arrays = read_call(folder)
        seen.add((record.texts["steps"], len(arrays)))
        write_call(folder, other, {})
        assert read_call(folder) == (other, {})
    assert seen == {("3", 2), ("4", 0)}


def test_children(tmp_path):
    for number in (12, 3, 1_000_000):
        child(tmp_path, "round", number).mkdir()
    for name in ("round-1", "shard-000001", "a-round-000001"):
        (tmp_path / name).mkdir()
    child(tmp_path, "round", 7).write_text("")
    assert children(tmp_path, "round") == [3, 12, 1_000_000]
    assert child(tmp_path, "round", 3).name == "round-000003"
    assert children(tmp_path / "none", "round") == []
