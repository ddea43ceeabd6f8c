"""A record of the arguments of a method whose rounds are trained by another `fit`: its runs do not record them."""

from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints
from ..train.resume._check import check_same_call
from ..train.resume._texts import option_text

_OTHER_FIT = {"fit": "another function"}


def texts_of(own: dict[str, Any], *, name: str) -> dict[str, str]:
    """A method's own arguments, as texts."""
    return {"method": name} | {word: option_text(value) for word, value in own.items() if value is not None}


def check_recorded(folder: Path, texts: dict[str, str], *, other_fit: bool, name: str) -> None:
    """Raises if the rounds in a folder are of another call, or of another kind of `fit`."""
    record = _record(folder)
    if record.steps:
        check_same_call(record.restore({}).meta, texts | _OTHER_FIT if other_fit else {}, folder, name=name)


def write_record(folder: Path, texts: dict[str, str]) -> None:
    """Saves the arguments that later rounds depend on, after the first: a call that fails in it may change them."""
    record = _record(folder)
    if not record.steps:
        record.save(0, {}, meta=texts | _OTHER_FIT)


def _record(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "call")
