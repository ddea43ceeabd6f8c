"""Tables: a data frame where pandas is installed, else columns that are shown as a table."""

import html
from typing import Any

import numpy as np


class Table(dict[str, np.ndarray]):
    """Columns by name, shown as a table in a terminal and in a notebook."""

    def _rows(self) -> list[tuple[str, ...]]:
        """The names and the rows as text; of many rows the first and the last."""
        text = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
        rows = list(zip(*([name, *map(text, values.tolist())] for name, values in self.items()), strict=True))
        return rows if len(rows) <= 21 else [*rows[:11], ("...",) * len(self), *rows[-10:]]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def _repr_html_(self) -> str:
        line = lambda tag, row: "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row) + "</tr>"
        first, *rows = self._rows()
        return f"<table>{line('th', first)}{''.join(line('td', row) for row in rows)}</table>"


def table_of(columns: dict[str, np.ndarray]) -> Any:
    """A `pandas.DataFrame` if pandas is installed, else a `Table`; a column of arrays becomes one for each number."""
    flat = Table()
    for name, values in columns.items():
        for index in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in index)] = values[:, *index]
    try:
        from pandas import DataFrame
    except ImportError:
        return flat
    return DataFrame(flat)
