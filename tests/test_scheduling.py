"""Groups of tests stay together, and the crash of a worker is the failure of one test."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from . import scheduling

HERE = pathlib.Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from scheduling import make_scheduler

def pytest_xdist_make_scheduler(config, log):
    return make_scheduler(config, log)
"""
TESTS = """
import os, pytest

@pytest.mark.parametrize("i", range(12))
def test_one(i):
    if i in {crashing}:
        os._exit(9)
"""


def test_groups_are_of_tests_that_exist():
    assert [path for path in scheduling.GROUPS if not (HERE.parent / path).exists()] == []
    assert scheduling.group_of("tests/test_notebooks.py::test_one[x]") == "notebooks"
    assert scheduling.group_of("tests/test_marks.py::test_one[x]") == "tests/test_marks.py::test_one[x]"


# The first tests of a worker, one in the middle, the last ones, when no work is left to assign; two workers at once.
@pytest.mark.parametrize(
    "crashing",
    [*(pytest.param(crashing, marks=pytest.mark.slow) for crashing in ({0}, {5}, {0, 1, 10, 11})), {11}],
    ids=str,
)
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_a_crash_fails_one_test_and_the_others_run(crashing, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS.format(crashing=crashing))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(crashing)} failed, {12 - len(crashing)} passed" in last
