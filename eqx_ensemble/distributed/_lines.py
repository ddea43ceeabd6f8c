"""Splits the output of a process into lines, without waiting for the end of a very long one."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LONGEST = 2**16  # bytes of a line; a longer one is split into pieces
# A carriage return at the very end may be the first half of `\r\n`.
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class Line(NamedTuple):
    """A line without its end. `update`: the next line overwrites it, as in a progress bar."""

    text: bytes
    update: bool


def lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """The lines in chunks of bytes; the last one may lack its end. Empty updates are dropped."""
    held = b""
    for chunk in chunks:
        held += chunk
        begin = 0
        for end in _END.finditer(held):
            yield from _pieces(held[begin : end.start()], update=end.group() == b"\r")
            begin = end.end()
        held = held[begin:]
        while len(held.removesuffix(b"\r")) > LONGEST:
            yield Line(held[:LONGEST], update=False)
            held = held[LONGEST:]
    if held:
        yield from _pieces(held.removesuffix(b"\r"), update=held.endswith(b"\r"))


def _pieces(text: bytes, *, update: bool) -> Iterator[Line]:
    while len(text) > LONGEST:
        yield Line(text[:LONGEST], update=False)
        text = text[LONGEST:]
    if text.strip() or not update:
        yield Line(text, update)
