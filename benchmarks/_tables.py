"""Data sets that packages carry, for comparisons of quality."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Table:
    """Inputs `(rows, features)` and targets `(rows,)`: class indices if `num_classes` is not 0."""

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int = 0

    def split(self, seed: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Training, validation and test rows (68, 12 and 20 %), standardised by the training rows."""
        order = np.random.default_rng(seed).permutation(len(self.x))
        ends = round(0.68 * len(order)), round(0.8 * len(order))
        parts = np.split(order, ends)
        x, y = _standardise(self.x, parts[0]), self.y
        if not self.num_classes:
            y = _standardise(y, parts[0])
        return tuple((x[rows], y[rows]) for rows in parts)


def _standardise(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float32)
    spread = values[rows].std(0)
    return (values - values[rows].mean(0)) / np.where(spread > 1e-6, spread, 1).astype(np.float32)


def tables(*, quick: bool) -> Iterator[Table | str]:
    """The data sets; for one whose package is missing, its name."""
    for name, package, load in _TABLES:
        if importlib.util.find_spec(package) is None:
            yield name
        elif not quick or name in ("diabetes", "wine"):
            yield load(name)


def _sklearn(num_classes: int) -> Callable[[str], Table]:
    def load(name: str) -> Table:
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
        return Table(name, x, y.astype(np.int32) if num_classes else y, num_classes)

    return load


def _mlxtend(function: str, num_classes: int = 0) -> Callable[[str], Table]:
    def load(name: str) -> Table:
        import mlxtend.data

        x, y = getattr(mlxtend.data, function)()
        known = np.isfinite(x).all(1)  # cars without a known power
        x, y = x[known], y[known]
        return Table(name, x, y.astype(np.int32) if num_classes else y, num_classes)

    return load


def _visits(name: str) -> Table:
    """Visits to doctors, of every tenth person and year."""
    import statsmodels.api as sm

    data = sm.datasets.randhie.load_pandas().data.iloc[::10]
    return Table(name, data.drop(columns="mdvis").to_numpy(), np.log1p(data["mdvis"].to_numpy()))


_TABLES = (
    ("diabetes", "sklearn", _sklearn(0)),
    ("housing", "mlxtend", _mlxtend("boston_housing_data")),
    ("miles per gallon", "mlxtend", _mlxtend("autompg_data")),
    ("doctor visits", "statsmodels", _visits),
    ("breast cancer", "sklearn", _sklearn(2)),
    ("wine", "sklearn", _sklearn(3)),
    ("digits", "sklearn", _sklearn(10)),
    ("MNIST-5k", "mlxtend", _mlxtend("mnist_data", 10)),
)
