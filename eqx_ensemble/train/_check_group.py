from collections.abc import Iterable, Mapping
from typing import Any

from .._check import kind_text
from .._ensemble._check_group import check_part_names
from ..checkpoint import Checkpoints
from ._run import Run
from .compiled._selection import Mode


def check_runs(runs: Any, *, name: str) -> dict[str, Run[Any]]:
    """Raises unless `runs` are runs of `fit` by the names of their parts. Returns them as a dict."""
    if not isinstance(runs, Mapping) or not runs:
        raise TypeError(f"`{name}` needs a dict from the names of parts to their runs, got {kind_text(runs)}.")
    check_part_names(runs, name=name)
    for part, run in runs.items():
        if not isinstance(run, Run):
            raise TypeError(f"`{name}` needs runs of `fit`, got {kind_text(run)} for the part {part!r}.")
    return dict(runs)


def check_one_mode(runs: Mapping[str, Run[Any]], *, by: Any, name: str) -> Mode:
    """Raises if members are ranked by scores of different modes. Returns the mode."""
    modes: dict[Mode, str] = {run.mode: part for part, run in runs.items() if run.selection is not None}
    if by is None and len(modes) > 1:
        listed = " and ".join(f"{mode!r} of `{part}`" for mode, part in modes.items())
        raise ValueError(
            f"`{name}` needs validation scores of one `mode`, got {listed}.\n"
            "Pass one score for each member: `by=scores, mode=...`."
        )
    return next(iter(modes)) if modes else "min"


def check_no_states(runs: Mapping[str, Run[Any]], *, name: str) -> None:
    """Raises if members have states that are not selected with them."""
    stateful = [part for part, run in runs.items() if run.state is not None]
    if stateful:
        raise TypeError(
            f"`{name}` returns members without their states, and those of {stateful[0]!r} have some.\n"
            f"Get both from a part: `ensemble, state = run.runs[{stateful[0]!r}].best_with_state(...)`."
        )


def check_data_of_parts(data: Any, parts: Iterable[str], *, name: str) -> None:
    """Raises if an iterable of batches that all parts use can be iterated only once."""
    if iter(data) is data:
        listed = ", ".join(f"{part!r}: ..." for part in parts)
        raise TypeError(
            f"`{name}` trains the parts of a group one after another, and {kind_text(data)} can be iterated only once."
            "\nPass what can be iterated again, such as a loader or a list, or an iterator for each part: "
            f"`{{{listed}}}`."
        )


def check_folder_of_parts(checkpoint: Any, *, name: str) -> None:
    """Raises for one `Checkpoints` for all parts; a path or a dict is accepted."""
    if isinstance(checkpoint, Checkpoints):
        raise TypeError(
            f"`{name}` needs a folder as `checkpoint` for a group, in which each part has a folder; one `Checkpoints` "
            "is for one run.\nPass a path, or a dict with `Checkpoints` for each part."
        )


def interrupted_message(untrained: list[str]) -> str:
    """The warning that some parts of a group were not trained."""
    return (
        f"`fit` was interrupted; these parts of the group have not been trained, and are not in the run: "
        f"{', '.join(f'`{part}`' for part in untrained)}."
    )
