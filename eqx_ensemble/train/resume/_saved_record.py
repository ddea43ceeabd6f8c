"""What `fit` writes about a run into the metadata of a checkpoint."""

from typing import Any, NamedTuple

from ...checkpoint import Contents
from ...checkpoint._check_record import (
    check_fields,
    check_valid,
    explain_record,
    is_count,
    is_seconds,
    is_string,
    is_texts,
)
from .._revive import Revival
from ..data._cursor import Cursor, decode, encode
from ._check import check_of_fit


class SavedRecord(NamedTuple):
    """The record of a run.

    **Attributes:**

    - `identity`, `conditions`: texts that identify the call, and what else determines its last bits.
    - `steps`, `validations`: the numbers of recorded columns.
    - `revived`, `place`: the revived members, and the position in the data.
    - `seconds`, `continued`: durations of the call, and of the runs that it continues; `begun`: its first step.
    """

    identity: dict[str, str]
    conditions: dict[str, str]
    steps: int
    validations: int
    revived: list[Revival] | None
    place: Cursor
    seconds: float
    continued: float
    begun: int

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        revived = None if self.revived is None else [list(each) for each in self.revived]
        place = list(self.place._replace(state=encode(self.place.state)))
        return self._asdict() | {"revived": revived, "place": place}


_KINDS = {
    "identity": is_texts,
    "conditions": is_texts,
    "steps": is_count,
    "validations": is_count,
    "seconds": is_seconds,
    "continued": is_seconds,
    "begun": is_count,
    "revived": lambda value: value is None or (type(value) is list and all(map(_is_revival, value))),
    "place": lambda value: _is_place(value),
}


def read_record(contents: Contents, path: Any, folder: Any) -> SavedRecord:
    """The record in a checkpoint at `path`; `ValueError` if `fit` did not write it, else `CheckpointCorruptError`."""
    saved = check_of_fit(contents.meta, folder)
    with explain_record(path):
        fields = check_fields(saved, _KINDS, "fit")
        for name, word in (("history_step", "steps"), ("validation_step", "validations")):
            expected = f"i64[{fields[word]}]"
            check_valid(f"`{word}` is not what was recorded", holds=contents.leaves.get(f"['{name}']") == expected)
        done = -1 if contents.step is None else contents.step
        check_valid("it begins after its step", holds=fields["begun"] <= done)
        epochs, batches, state, digest = fields["place"]
        # Each epoch has a batch, and each step takes one: more of them would only be counted.
        check_valid("`place` is after the step", holds=max(epochs, batches) <= done + 1)
        revived = None if fields["revived"] is None else [Revival(*each) for each in fields["revived"]]
        fields = {name: fields[name] for name in SavedRecord._fields}
        return SavedRecord(**fields | {"revived": revived, "place": Cursor(epochs, batches, decode(state), digest)})


def _is_revival(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 3
        and all(map(is_count, value[:2]))
        and (value[2] is None or is_count(value[2]))
    )


def _is_place(value: Any) -> bool:
    if type(value) is not list or len(value) != len(Cursor._fields):
        return False
    return is_count(value[0]) and is_count(value[1]) and (value[3] is None or is_string(value[3]))
