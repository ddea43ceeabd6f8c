"""Data sets that packages carry, in five folds, for comparisons of quality."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

FOLDS = 5


class Split(NamedTuple):
    """Pairs of inputs and targets; in addition, inputs of classes that the other parts do not have."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    unknown: np.ndarray


@dataclasses.dataclass(frozen=True)
class Table:
    """Inputs `(rows, features)` and targets `(rows,)`: class indices if `num_classes` is not 0."""

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int = 0
    images: bool = False
    unknown: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows that are used: folds have equal sizes, and so need one compiled program."""
        return len(self.x) // FOLDS * FOLDS

    def split(self, fold: int) -> Split:
        """Training, validation and test rows: 68, 12 and 20 %. Every row is a test row in one of the folds.

        All are standardised by the training rows: each column, but pixels of images all alike.
        """
        folds = np.split(np.random.default_rng(0).permutation(len(self.x))[: self.num_rows], FOLDS)
        test = folds.pop(fold)
        others = np.random.default_rng(fold + 1).permutation(np.concatenate(folds))
        validation, train = np.split(others, [round(0.15 * len(others))])
        axis = None if self.images else 0
        to_unit = _standardiser(self.x[train], axis)
        y = self.y if self.num_classes else _standardiser(self.y[train], 0)(self.y)
        parts = ((to_unit(self.x[rows]), y[rows]) for rows in (train, validation, test))
        return Split(*parts, to_unit(self.x[:0] if self.unknown is None else self.unknown))


def _standardiser(values: np.ndarray, axis: int | None) -> Callable[[np.ndarray], np.ndarray]:
    mean, deviation = values.mean(axis), values.std(axis)
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return lambda x: ((x - mean) / deviation).astype(np.float32)


def tables(*, quick: bool) -> Iterator[Table | str]:
    """The data sets; for one whose package is missing, its name."""
    for name, package, load in _TABLES:
        if importlib.util.find_spec(package) is None:
            yield name
        elif not quick or name == "digits 0 to 7":
            yield load(name)


def _sklearn(num_classes: int, *, images: bool = False) -> Callable[[str], Table]:
    def load(name: str) -> Table:
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
        return Table(name, x, y.astype(np.int32) if num_classes else y, num_classes, images)

    return load


def _known_digits(name: str) -> Table:
    """The other digits, 8 and 9, are unknown."""
    digits = _sklearn(10, images=True)("digits")
    known = digits.y < 8
    return Table(name, digits.x[known], digits.y[known], 8, images=True, unknown=digits.x[~known])


def _mlxtend(function: str, num_classes: int = 0, *, images: bool = False) -> Callable[[str], Table]:
    def load(name: str) -> Table:
        import mlxtend.data

        x, y = getattr(mlxtend.data, function)()
        x = x[:, np.isfinite(x).all(axis=0)]  # names of cars are read as NaN
        return Table(name, x, y.astype(np.int32) if num_classes else y, num_classes, images)

    return load


def _visits(name: str) -> Table:
    """Did a person see a doctor within the year? Every tenth row, so that a person is in one row at most."""
    import statsmodels.api as sm

    data = sm.datasets.randhie.load_pandas().data.iloc[::10]
    return Table(name, data.drop(columns="mdvis").to_numpy(), (data["mdvis"] > 0).to_numpy(np.int32), 2)


_TABLES = (
    ("diabetes", "sklearn", _sklearn(0)),
    ("miles per gallon", "mlxtend", _mlxtend("autompg_data")),
    ("housing", "mlxtend", _mlxtend("boston_housing_data")),
    ("doctor visits", "statsmodels", _visits),
    ("breast cancer", "sklearn", _sklearn(2)),
    ("wine", "sklearn", _sklearn(3)),
    ("digits", "sklearn", _sklearn(10, images=True)),
    ("MNIST-5k", "mlxtend", _mlxtend("mnist_data", 10, images=True)),
    ("digits 0 to 7", "sklearn", _known_digits),
)
