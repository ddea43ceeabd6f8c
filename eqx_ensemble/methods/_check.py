from collections.abc import Iterable, Mapping
from typing import Any

from .._caller import caller
from .._check import check_positive_int


def check_length(**lengths: Any) -> tuple[str, int]:
    """Raises unless exactly one length is given. Returns its name and value."""
    given = {unit: length for unit, length in lengths.items() if length is not None}
    if len(given) != 1:
        words = " or ".join(f"`{unit}`" for unit in lengths)
        raise TypeError(f"`{caller()}` needs either {words}, got {'both' if given else 'neither'}.")
    ((unit, length),) = given.items()
    check_positive_int(length, unit)
    return unit, length


def check_options(options: Mapping[str, Any], refused: Iterable[str], reason: str) -> None:
    """Raises if an option of `fit` that the method does not support is given."""
    given = [f"`{word}`" for word in refused if options.get(word) is not None]
    if given:
        raise TypeError(f"`{caller()}` does not take {', '.join(given)}: {reason}.")
