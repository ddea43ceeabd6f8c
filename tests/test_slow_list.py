"""The list of slow tests names tests that exist."""

import pathlib
import re

from . import conftest

HERE = pathlib.Path(__file__).parent
LINES = [line for line in (HERE / "slow.txt").read_text().splitlines() if not line.startswith("#")]


def is_there(line):
    path, *names = line.partition("[")[0].split("::")
    source = (HERE.parent / path).read_text() if (HERE.parent / path).exists() else ""
    return bool(names) and all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names)


def test_every_line_is_a_test():
    assert [line for line in LINES if not is_there(line)] == []
    assert LINES == sorted(set(LINES))


def test_a_test_that_is_gone_would_be_noticed():
    assert is_there("tests/test_slow_list.py::test_every_line_is_a_test[with a parameter]")
    assert not is_there("tests/test_slow_list.py::test_gone")
    assert not is_there("tests/test_gone.py::test_every_line_is_a_test")


def test_listed_tests_are_marked():
    class Item:
        def __init__(self, nodeid):
            self.nodeid, self.marks = nodeid, []

        def add_marker(self, name):
            self.marks.append(name)

    line = next(line for line in LINES if "[" in line)
    items = [Item(line), Item(line.partition("[")[0] + "[a parameter that is not listed]")]
    conftest.pytest_collection_modifyitems(items)
    assert [item.marks for item in items] == [["slow"], []]
