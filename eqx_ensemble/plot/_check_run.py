from collections.abc import Mapping
from typing import Any

import numpy as np

from .._check import check_optional_text, check_sequence, check_word, kind_text, needs_message
from ..train import History
from ..train._run import Run
from ._check import check_plotted


def check_curves(name: str, run: Any, curve: str) -> None:
    """Raises unless `run` is a run or its history, with a finite value of the given curve."""
    if not isinstance(run, Run | History):
        raise TypeError(
            needs_message(name, "a `Run` or its `History`", f"got {kind_text(run)}", "Pass the result of `fit`.")
        )
    check_word(curve, "curve", ("loss", "validation"), name=name)
    history = run.history if isinstance(run, Run) else run
    if curve == "validation" and history.validation is None:
        raise ValueError(
            needs_message(
                name, "validation scores", "got a run without", "Train with `validation=` data, or plot the loss."
            )
        )
    if not np.isfinite(getattr(history, curve)).any():
        raise ValueError(
            needs_message(
                name,
                f"a finite number in `history.{curve}`",
                "got none",
                "`run.fault` is the first value that was not finite.",
            )
        )


def check_columns(name: str, table: Any, columns: Any, log: Any, score: str | None) -> str:
    """Raises unless `table` has the given columns. Returns the name of the column that determines the shade."""
    if not callable(getattr(table, "items", None)) or not len(table):
        raise TypeError(
            needs_message(
                name, "a table, a dict from column to values", f"got {kind_text(table)}", "Pass `run.table()`."
            )
        )
    check_optional_text(score, "score", name=name)
    score = score or ("validation" if "validation" in table else "loss")
    for option, names in (("columns", columns), ("log", log), ("score", [score])):
        if isinstance(names, str):
            raise TypeError(
                needs_message(name, f"`{option}` as a list of names", f"got {names!r}", f"Pass `{option}=[{names!r}]`.")
            )
        names = () if names is None else check_sequence(names, option, name=name, of="names")
        missing = [argument for argument in names if not isinstance(argument, str) or argument not in table]
        if missing:
            listed = ", ".join(f"`{argument}`" for argument in table)
            fix = f"Columns of the table: {listed}."
            raise ValueError(needs_message(name, f"names of columns in `{option}`", f"got {missing[0]!r}", fix))
    return score


def check_lines(name: str, lines: Mapping[str, Any], log: Any) -> dict[str, np.ndarray]:
    """Raises unless two or more columns have equally many numbers, positive on logarithmic scales. Returns them."""
    checked = {
        argument: check_plotted(name, argument, values, "(members,)", finite=False)
        for argument, values in lines.items()
    }
    if len(checked) < 2:
        fix = "A run without `hyper` has only scores; pass names of columns as `columns`."
        raise ValueError(needs_message(name, "two or more columns", f"got {list(checked)}", fix))
    if len({values.shape for values in checked.values()}) > 1:
        listed = ", ".join(f"{len(values)} in `{argument}`" for argument, values in checked.items())
        raise ValueError(
            needs_message(
                name, "one number per member in every column", f"got {listed}", "Rows of the table are members."
            )
        )
    for argument, values in checked.items():
        finite = values[np.isfinite(values)]
        if not len(finite):
            raise ValueError(
                needs_message(
                    name, f"a finite number in column `{argument}`", "got none", "Pass other columns as `columns`."
                )
            )
        if argument in (log or ()) and finite.min() <= 0:
            raise ValueError(
                needs_message(
                    name, f"positive numbers in column `{argument}`", f"got {finite.min():g}", "Zero has no logarithm."
                )
            )
    return checked
