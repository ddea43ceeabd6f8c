import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from .._caller import caller
from ..train._engine import data_frame

SUFFIXES = ("", "_error", "_difference", "_difference_error")
"""Of the columns that a score has in a summary."""


class Row(NamedTuple):
    """One fit: its scores, the seconds that it took, and why it failed."""

    method: str
    fold: int
    seed: int
    scores: dict[str, float]
    seconds: float
    error: str


@final
class Comparison(NamedTuple):
    """The result of [`eqx_ensemble.methods.compare`][]. Printing it shows the summary.

    **Attributes:**

    - `rows`: the fits, by method, seed and fold.
    - `scores`: the names of the scores.
    - `ratio`: of test to training rows in a fold; 0 for one split.
    """

    rows: tuple[Row, ...]
    scores: tuple[str, ...]
    ratio: float

    def table(self, *, as_frame: bool = False) -> Any:
        """One row for each fit: `method`, `fold`, `seed`, scores, `seconds` of training with compilation, `error`.

        **Arguments:**

        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`).

        **Returns:** a dict from column names to arrays, or a data frame. Scores of a fit that failed are NaN.
        """
        columns: dict[str, Any] = {name: [getattr(row, name) for row in self.rows] for name in Row._fields}
        found, last = columns.pop("scores"), {name: columns.pop(name) for name in ("seconds", "error")}
        columns |= {name: [own.get(name, np.nan) for own in found] for name in self.scores}
        return _arrays(columns | last, as_frame=as_frame)

    def summary(self, baseline: str | None = None, *, corrected: bool = True, as_frame: bool = False) -> Any:
        r"""One row for each method: means of scores, and of paired differences from a baseline, with standard errors.

        A difference is between two fits in one fold with one seed. Folds share training rows: their scores are
        correlated, and the usual standard error $s / \sqrt{n}$ of $n$ fits is too small. That of Nadeau and Bengio is
        $s \sqrt{1 / n + n_2 / n_1}$, with $n_2$ test and $n_1$ training rows. For one split (`test=`), both are the
        error over seeds alone.

        **Arguments:**

        - `baseline`: the name of a method; by default the first.
        - `corrected`: whether errors are those of Nadeau and Bengio.
        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`).

        **Returns:** a dict of columns, or a data frame: `method`, the number of `fits` and of those that `failed`, mean
        `seconds`; and for a score such as `nll`: `nll`, `nll_error`, `nll_difference`, `nll_difference_error`. Fits
        that failed are left out.

        ??? cite
            [Nadeau and Bengio 2003](https://doi.org/10.1023/A:1024068626366)
        """
        names = list(dict.fromkeys(row.method for row in self.rows))
        baseline = names[0] if baseline is None else baseline
        if baseline not in names:
            raise ValueError(f"`{caller()}` needs the name of a method as `baseline`, of {names}; got {baseline!r}.")
        ratio, columns = self.ratio if corrected else 0.0, dict[str, list[Any]]()
        found = {name: {row[1:3]: row for row in self.rows if row.method == name} for name in names}
        first = found[baseline]
        for name, rows in found.items():
            fits = {at: row for at, row in rows.items() if not row.error}
            seconds = _mean_and_error([row.seconds for row in fits.values()], ratio)[0]
            own = {"method": name, "fits": len(fits), "failed": len(rows) - len(fits), "seconds": seconds}
            for score in self.scores:
                values = [row.scores[score] for row in fits.values()]
                gaps = [row.scores[score] - first[at].scores[score] for at, row in fits.items() if not first[at].error]
                numbers = *_mean_and_error(values, ratio), *_mean_and_error(gaps, ratio)
                own |= {score + suffix: x for suffix, x in zip(SUFFIXES, numbers, strict=True)}
            for column, x in own.items():
                columns.setdefault(column, []).append(x)
        return _arrays(columns, as_frame=as_frame)

    def __repr__(self) -> str:
        summary = self.summary()
        pairs = {f"{score}{suffix}": f"{score}{suffix}_error" for score in self.scores for suffix in SUFFIXES[::2]}
        columns = {"method": summary["method"].tolist()}
        for name, error in pairs.items():
            of_row = zip(summary[name], summary[error], strict=True)
            columns[name.replace("_difference", " - first")] = [f"{x:.4g} ± {e:.2g}" for x, e in of_row]
        columns |= {name: [f"{x:.3g}" for x in summary[name]] for name in ("seconds", "failed")}
        cells = [[name, *column] for name, column in columns.items()]
        widths = [max(map(len, column)) for column in cells]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*cells, strict=True)]
        count = summary["fits"][0] + summary["failed"][0]
        errors = {row.method: f"{row.method} failed by {row.error}" for row in reversed(self.rows) if row.error}
        return "\n".join(
            [f"Comparison of {len(lines) - 1} methods, {count} fits each", *lines, *[*errors.values()][::-1]]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _arrays(columns: Mapping[str, Any], *, as_frame: bool) -> Any:
    arrays = {name: np.array(values) for name, values in columns.items()}
    return data_frame(arrays) if as_frame else arrays


def _mean_and_error(values: Sequence[float], ratio: float) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0] if values else np.nan), np.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) * np.sqrt(1 / len(values) + ratio))
