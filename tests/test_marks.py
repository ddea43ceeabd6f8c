"""The list of marks names tests that exist, and is followed."""

import pathlib

import pytest

from . import conftest

HERE = pathlib.Path(__file__).parent
LINES = [line for line in (HERE / "marks.txt").read_text().splitlines() if not line.startswith("#")]


def stale(listed, collected):
    """The lines that name nothing of what was collected, in files that were."""
    files = {nodeid.partition("::")[0] for nodeid in collected}
    known = set(collected) | {nodeid.partition("[")[0] for nodeid in collected}
    return [nodeid for nodeid in listed if nodeid.partition("::")[0] in files and nodeid not in known]


def test_lines_are_in_order_and_once():
    nodeids = [line.split(" ", 1)[1] for line in LINES]
    assert nodeids == sorted(set(nodeids))
    assert {line.split(" ", 1)[0] for line in LINES} <= {"slow", "exhaustive", "default"}
    assert [
        path for path in {nodeid.partition("::")[0] for nodeid in nodeids} if not (HERE.parent / path).exists()
    ] == []


def test_every_line_is_a_test(request):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only a part of a file was collected")
    assert stale(conftest.listed_marks(), request.config.stash[conftest.COLLECTED]) == []


def test_a_stale_line_would_be_noticed():
    collected = ["tests/a.py::test_one", "tests/a.py::test_two[x]"]
    assert stale(["tests/a.py::test_one", "tests/a.py::test_two", "tests/a.py::test_two[x]"], collected) == []
    assert stale(["tests/b.py::test_not_collected"], collected) == []
    lines = ["tests/a.py::test_gone", "tests/a.py::test_two[gone]", "tests/a.py::test_one[x]"]
    assert stale(lines, collected) == lines


def test_marks_are_replaced(monkeypatch):
    class Item:
        def __init__(self, nodeid, *marks):
            self.nodeid, self.own_markers = nodeid, [getattr(pytest.mark, mark).mark for mark in marks]

        def add_marker(self, name):
            self.own_markers.append(getattr(pytest.mark, name).mark)

    class Config:
        stash = pytest.Stash()
        getoption = {"turn": None}.get

    listed = {"a": "exhaustive", "a[slow]": "slow", "a[default]": "default"}
    monkeypatch.setattr(conftest, "_MARKS", listed)
    items = [Item("a[x]", "slow", "parametrize"), Item("a[slow]"), Item("a[default]", "slow"), Item("b[x]", "slow")]
    conftest.pytest_collection_modifyitems(Config, items)
    names = [[mark.name for mark in item.own_markers] for item in items]
    assert names == [["parametrize", "exhaustive"], ["slow"], [], ["slow"]]
    assert Config.stash[conftest.COLLECTED] == ["a[x]", "a[slow]", "a[default]", "b[x]"]


def test_turns_share_the_slow_tests():
    class Item:
        def __init__(self, *marks):
            self.marks = [getattr(pytest.mark, mark).mark for mark in marks]

        def iter_markers(self):
            return self.marks

    items = [Item("slow"), Item(), Item("slow", "parametrize"), Item("slow"), Item("exhaustive"), Item("slow")]
    turns = [conftest.in_turn(items, f"{turn}/3") for turn in (1, 2, 3)]
    assert turns[0] == [True, True, False, False, True, True]
    assert [sum(kept) for kept in zip(*turns, strict=True)] == [1, 3, 1, 1, 3, 1]
