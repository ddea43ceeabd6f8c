"""Data sets that packages carry, and their splits into rows to train, to validate and to test."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

FOLDS = 5
LAGS, MONTHS = 12, (360, 60, 60)
FEW = 80


class Split(NamedTuple):
    """Pairs of inputs and targets; inputs of classes that the other parts do not have; a pair to train a base by."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    unknown: np.ndarray
    before: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs `(rows, features)` and targets `(rows,)`: class indices if `num_classes` is not 0.

    `kind` says how rows are split: "folds", "months" in windows that move on, or "few" to train. Those to which a model
    trained on rows `before` is tuned are few.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int = 0
    images: bool = False
    unknown: np.ndarray | None = None
    kind: str = "folds"
    before: tuple[np.ndarray, np.ndarray] | None = None

    def split(self, fold: int) -> Split:
        """Rows standardised by those to train: each column, but pixels of images all alike."""
        train, validation, test = {"folds": self._folds, "months": self._months, "few": self._few}[self.kind](fold)
        rows = self.before[0] if self.before else self.x[train]
        to_unit = _standardiser(rows, None if self.images else 0)
        y = self.y if self.num_classes else _standardiser(self.y[train], 0)(self.y)
        parts = ((to_unit(self.x[own]), y[own]) for own in (train, validation, test))
        before = (to_unit(self.before[0]), self.before[1]) if self.before else None
        return Split(*parts, to_unit(self.x[:0] if self.unknown is None else self.unknown), before)

    def _folds(self, fold: int) -> list[np.ndarray]:
        """68, 12 and 20 %. Every row is a test row in one of the folds, whose sizes are equal: one compiled program."""
        used = np.random.default_rng(0).permutation(len(self.x))[: len(self.x) // FOLDS * FOLDS]
        folds = np.split(used, FOLDS)
        test = folds.pop(fold)
        others = np.random.default_rng(fold + 1).permutation(np.concatenate(folds))
        validation, train = np.split(others, [round(0.15 * len(others))])
        return [train, validation, test]

    def _months(self, fold: int) -> list[np.ndarray]:
        """Rows to test are later than those to validate, and these later than those to train."""
        ends = np.cumsum([fold * MONTHS[2], *MONTHS])
        return [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def _few(self, fold: int) -> list[np.ndarray]:
        return np.split(np.random.default_rng(fold).permutation(len(self.x)), [FEW, 2 * FEW])


def _standardiser(values: np.ndarray, axis: int | None) -> Callable[[np.ndarray], np.ndarray]:
    mean, deviation = values.mean(axis), values.std(axis)
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return lambda x: ((x - mean) / deviation).astype(np.float32)


def load(name: str) -> Data:
    return LOADERS[name](name)


def _sklearn(num_classes: int, *, images: bool = False) -> Callable[[str], Data]:
    def make(name: str) -> Data:
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
        return Data(name, x, y.astype(np.int32) if num_classes else y, num_classes, images)

    return make


def _known_digits(name: str) -> Data:
    """The other digits, 8 and 9, are unknown."""
    digits = _sklearn(10, images=True)("digits")
    known = digits.y < 8
    return Data(name, digits.x[known], digits.y[known], 8, images=True, unknown=digits.x[~known])


def _tilted_digits(name: str) -> Data:
    """Digits turned by about 25 degrees and noisy, to which a model of 600 upright ones is tuned."""
    from scipy.ndimage import rotate

    rng, upright = np.random.default_rng(0), _known_digits(name)
    assert upright.unknown is not None

    def tilt(rows: np.ndarray) -> np.ndarray:
        images = [rotate(row.reshape(8, 8), rng.normal(25, 10), reshape=False, order=1).ravel() for row in rows]
        return np.stack(images) + rng.normal(0, 0.2 * 16, rows.shape)

    before = upright.x[:600], upright.y[:600]
    tilted = {"x": tilt(upright.x[600:]), "y": upright.y[600:], "unknown": tilt(upright.unknown)}
    return dataclasses.replace(upright, kind="few", before=before, **tilted)


def _visits(name: str) -> Data:
    """Did a person see a doctor within the year? Every tenth row, so that a person is in one row at most."""
    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data.iloc[::10]
    return Data(name, data.drop(columns="mdvis").to_numpy(), (data["mdvis"] > 0).to_numpy(np.int32), 2)


def _sea(name: str) -> Data:
    """The temperature of the sea in the next month, from those of the last twelve and the time of the year."""
    from statsmodels.datasets import elnino

    months = elnino.load_pandas().data.drop(columns="YEAR").to_numpy().reshape(-1)
    windows = np.lib.stride_tricks.sliding_window_view(months, LAGS + 1)
    angle = 2 * np.pi * (np.arange(len(windows)) % 12) / 12
    x = np.column_stack([windows[:, :LAGS], np.sin(angle), np.cos(angle)])
    return Data(name, x, windows[:, LAGS], kind="months")


LOADERS: dict[str, Callable[[str], Data]] = {
    "diabetes": _sklearn(0),
    "El Nino": _sea,
    "doctor visits": _visits,
    "breast cancer": _sklearn(2),
    "wine": _sklearn(3),
    "digits": _sklearn(10, images=True),
    "digits 0 to 7": _known_digits,
    "tilted digits": _tilted_digits,
}
