from collections.abc import Iterable, Iterator
from typing import Any


def part_names(parts: Iterable[Any], taken: Iterable[str] = ()) -> list[str]:
    """A name for each part: the class of its members, with a number if that name is taken."""
    names, before = [], set(taken)
    for part in parts:
        kind = type(part.stacked).__name__
        candidates: Iterator[str] = (kind if i == 1 else f"{kind}_{i}" for i in range(1, len(before) + 2))
        names.append(next(own for own in candidates if own not in before))
        before.add(names[-1])
    return names
