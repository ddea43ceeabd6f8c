"""`project` depends on this library: it runs as its users run it, in processes of their own."""

import json
import os
import pathlib
import sys

import pytest

from ..children import Child
from ..marking import slow_but

HERE = pathlib.Path(__file__).parent
PROJECT = HERE / "project"
ROOT = HERE.parent.parent

STRICT = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
STRICT_WARNINGS = ["-W", "error", "-X", "dev"]
ALL_AT_ONCE = ["-OO", *STRICT_WARNINGS], STRICT
SWITCHES = ["jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks", "jax_disable_jit", "jax_enable_checks"]
SWITCHES += ["jax_debug_key_reuse", "jax_explain_cache_misses", "jax_legacy_prng_key"]
REFUSED = {
    "annotation": ["TypeCheckError", ""],
    "stack": ["MemberMismatchError", "`stack` needs models that differ only in their arrays"],
    "weights": ["ValueError", "`combine.mean` needs finite `weights` of zero or more"],
    "rows": ["ValueError", "`fit` needs `batch_size` of at least 1, got 0"],
    "key": ["TypeError", "`member_keys` needs one key, or one per member, got the integer 0"],
    "index": ["IndexError", "`Ensemble.__getitem__`: index 3 is out of bounds"],
    "epochs": ["TypeError", "`fit` needs either `epochs` or `steps`, got neither"],
    "file": ["IsADirectoryError", "[Errno 21] Is a directory"],
}


def run(*arguments, text=None, **environment):
    """Runs Python to its end, with the project and the library on its path, and returns what it printed.

    `text` is what is typed.
    """
    paths = {"PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    child = Child([sys.executable, *map(str, arguments)], os.environ | paths | environment, text=text)
    try:
        code, out, err = child.finish(300)
    finally:
        child.kill()
    assert code == 0, out[-2000:] + err[-4000:]
    return out


def numbers(flags, environment):
    return json.loads(run(*flags, HERE / "programs/life.py", **environment))


@pytest.fixture(scope="module")
def plain():
    """The numbers of a plain process."""
    return numbers([], {})


HOOKS = {
    "its own hook": ([], {}, True),
    "after that of the library": (["eqx_ensemble"], {}, True),
    "both in one": (["forecasts", "eqx_ensemble"], {}, True),
    "no checks": (["eqx_ensemble"], {"JAXTYPING_DISABLE": "1"}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("hook", slow_but(["its own hook"], HOOKS))
def test_its_own_loop_callback_and_copies_under_its_hook(hook):
    packages, environment, is_checked = HOOKS[hook]
    printed = run("-W", "error", HERE / "programs/own_loop.py", *packages, **environment)
    assert json.loads(printed) == {"checked": is_checked, "stopped": True}


@pytest.mark.slow
def test_faults_are_refused_in_words(plain):
    assert (plain["optimise"], plain["docstring"], plain["dtype"]) == (0, True, "float32")
    assert plain["refused"].keys() == REFUSED.keys()
    for name, (kind, text) in plain["refused"].items():
        assert kind == REFUSED[name][0]
        assert text.startswith(REFUSED[name][1]), text


@pytest.mark.slow
def test_how_python_runs_changes_no_number_and_no_message(plain, tmp_path):
    flags, environment = ALL_AT_ONCE
    # jaxtyping's hook caches all that is imported below it under one name, whatever the level of `-O`.
    no_cache = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    other = numbers(flags, environment | no_cache)
    optimise = next((flag.count("O") for flag in flags if flag.startswith("-O")), 0)
    assert (other.pop("optimise"), other.pop("docstring")) == (optimise, optimise < 2)
    same = {name: value for name, value in plain.items() if name not in ("optimise", "docstring")}
    if optimise:  # beartype checks nothing then
        other["refused"].pop("annotation")
        same["refused"] = {name: value for name, value in same["refused"].items() if name != "annotation"}
    assert other == same


@pytest.mark.slow
def test_its_own_tests_pass_with_both_hooks():
    where = f"--rootdir={PROJECT}", "-c", PROJECT / "pyproject.toml", PROJECT / "checks"
    assert "8 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", *where)


@pytest.mark.slow
def test_spawned_workers_train_and_send_their_runs_back():
    assert "workers: equal" in run("-W", "error", HERE / "programs/workers.py")


@pytest.mark.slow
def test_threads_train_and_predict_at_the_same_time():
    assert "threads: equal" in run(HERE / "programs/threads.py")


@pytest.mark.slow
def test_names_are_used_for_the_first_time_by_several_threads():
    assert "first imports: 0 problems in 5 rounds" in run("-W", "error", HERE / "programs/first_imports.py", 5)


@pytest.mark.slow
def test_switches_that_people_turn_on_to_find_a_fault():
    differences = json.loads(run(HERE / "programs/switches.py", *SWITCHES))
    assert differences.keys() == {*SWITCHES}
    assert all(difference <= 1e-5 for difference in differences.values()), differences


@pytest.mark.slow
def test_grid_search_in_processes_of_joblib():
    pytest.importorskip("sklearn")
    assert "grid search: equal" in run(HERE / "programs/grid_search.py")


@pytest.mark.slow
def test_a_program_that_is_typed_in(tmp_path):
    """Line by line at a prompt, and as the text of `-c`: functions have no file, and their run is resumed."""
    text = (HERE / "programs/typed.py").read_text()
    at_prompt = run("-i", "-q", text=text, FOLDER=str(tmp_path / "prompt"))
    assert at_prompt == run("-c", text, FOLDER=str(tmp_path / "text"))
    lines = dict(line.split(": ", 1) for line in at_prompt.splitlines())
    assert lines["resumed"] == "True True"
    assert lines["refused"].startswith("`fit`")
