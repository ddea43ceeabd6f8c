"""A time series that a package carries, in windows that move on: forecasts are always of later months."""

import dataclasses

import numpy as np
from _tables import Split

LAGS = 12
TRAIN, VALIDATION, TEST = 360, 60, 60
FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Series:
    """The temperature of the sea in the next month, from those of the last twelve and the time of the year."""

    name: str = "El Nino"
    num_classes: int = 0
    images: bool = False

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs `(rows, features)` and targets `(rows,)`, of one month after another."""
        from statsmodels.datasets import elnino

        months = elnino.load_pandas().data.drop(columns="YEAR").to_numpy().reshape(-1)
        windows = np.lib.stride_tricks.sliding_window_view(months, LAGS + 1)
        angle = 2 * np.pi * (np.arange(len(windows)) % 12) / 12
        return np.column_stack([windows[:, :LAGS], np.sin(angle), np.cos(angle)]), windows[:, LAGS]

    def split(self, fold: int) -> Split:
        """Months to train, then months to validate, then months to test: sixty for each fold."""
        x, y = self.table
        start = fold * TEST
        ends = np.cumsum([start, TRAIN, VALIDATION, TEST])
        train, *_ = rows = [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        to_unit = lambda values: ((values - values[train].mean(0)) / values[train].std(0)).astype(np.float32)
        x, y = to_unit(x), to_unit(y)
        return Split(*((x[part], y[part]) for part in rows), x[:0])
