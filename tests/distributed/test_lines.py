"""Lines from bytes that arrive in any chunks."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_ensemble.distributed import _lines
from eqx_ensemble.distributed._lines import LONGEST, Line, lines

written = st.lists(st.sampled_from([b"a", b"bc", b" ", b"\n", b"\r", b"\r\n", b"d" * 5]), max_size=30).map(b"".join)


@given(written, st.lists(st.integers(0, 60), max_size=8))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_chunks_do_not_matter(text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lines, "LONGEST", 7)
        found = list(lines(chunks))
        assert found == list(lines([text]))
        assert all(len(line.text) <= 7 for line in found)
    ends = text.replace(b"\r\n", b"\n")
    assert b"".join(ends.split()).replace(b"\r", b"") == b"".join(b"".join(line.text.split()) for line in found)
    if b"\r" not in ends and max(map(len, ends.split(b"\n"))) <= 7:
        assert [line.text for line in found] == ends.removesuffix(b"\n").split(b"\n")[: len(found)]


def test_a_progress_bar():
    bar = [b"\r 0%", b"\r 50%", b"\r", b"100%\n", b"done\r\n", b"left"]
    expected = [(b" 0%", True), (b" 50%", True), (b"100%", False), (b"done", False), (b"left", False)]
    assert list(lines(bar)) == [Line(*line) for line in expected]


def test_a_line_without_end_is_not_held():
    tracemalloc.start()
    total = sum(len(line.text) for line in lines(b"x" * LONGEST for _ in range(500)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 500 * LONGEST
    assert most < 20 * LONGEST
