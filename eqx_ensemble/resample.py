"""Rows of the members: bootstraps, subsets and folds of one data set that all share, and held-out predictions."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from ._boundary import array_function, kinds
from ._brief import brief_repr
from ._check import check_number, check_positive_int, value_error
from ._keys import generators, key_words
from ._weighting import weighted_mean

__all__ = [
    "Folds",
    "HeldOut",
    "bayesian_weights",
    "bootstrap",
    "counts",
    "folds",
    "from_splits",
    "held_out_mean",
    "out_of_bag",
    "subsets",
]


def bootstrap(num_rows: int, num_members: int, *, size: int | float = 1.0, key: Any) -> Int32[Array, "members size"]:
    r"""Bootstrap: rows drawn with replacement, uniformly and independently for each member.

    A member misses a fraction $(1 - 1/n)^n \approx 0.37$ of the rows, its out-of-bag rows: see
    [`eqx_ensemble.resample.out_of_bag`][]. To draw whole groups of rows see [`eqx_ensemble.resample.counts`][].

    **Arguments:**

    - `num_rows`, `num_members`: the numbers of rows, `len(x)`, and of members.
    - `size`: the rows per member, a count, which may exceed `num_rows`, or a fraction of it, rounded.
    - `key`: one key.

    **Returns:** row indices `(members, size)`, for `fit(..., rows=...)`.

    ```python
    ee.resample.bootstrap(100, 8, key=key).shape  # (8, 100)
    ```

    ??? cite
        [Breiman 1996](https://doi.org/10.1007/BF00058655)
    """
    count = _count(size, num_rows)
    streams = generators(key, num_members, purpose="bootstrap")
    return _stack([stream.integers(num_rows, size=count) for stream in streams], np.int32)


def subsets(num_rows: int, num_members: int, *, size: int | float, key: Any) -> Int32[Array, "members size"]:
    """Subsets: rows drawn without replacement, in random order; every subset of `size` rows is equally likely.

    **Arguments:** as for [`eqx_ensemble.resample.bootstrap`][].

    **Returns:** row indices `(members, size)`, for `fit(..., rows=...)`.

    **Raises:** `ValueError` for a `size` above `num_rows`.

    ```python
    ee.resample.subsets(100, 8, size=0.5, key=key).shape  # (8, 50)
    ```
    """
    count = _count(size, num_rows)
    if count > num_rows:
        raise value_error("`size` of at most the number of rows", f"got {count} of {num_rows}", "See `bootstrap`.")
    streams = generators(key, num_members, purpose="subsets")
    return _stack([stream.choice(num_rows, count, replace=False) for stream in streams], np.int32)


def bayesian_weights(num_rows: int, num_members: int, *, key: Any) -> Float32[Array, "members rows"]:
    """Bayesian bootstrap weights: for each member, `num_rows` times a draw from Dirichlet(1, ..., 1).

    Each of the $n$ weights has mean 1 and variance $(n - 1) / (n + 1)$. None is 0: no row is out of bag, and no class
    is lost.

    **Arguments:**

    - `num_rows`, `num_members`, `key`: as for [`eqx_ensemble.resample.bootstrap`][].

    **Returns:** weights `(members, rows)`, for [`eqx_ensemble.Each`][].

    ```python
    ee.resample.bayesian_weights(100, 8, key=key).sum(axis=1)  # 100 for every member
    ```

    ??? cite
        [Rubin 1981](https://doi.org/10.1214/aos/1176345338)
    """
    check_positive_int(num_rows, "num_rows")
    # Exponential variables divided by their sum have this distribution.
    gaps = [s.standard_exponential(num_rows) for s in generators(key, num_members, purpose="bayesian weights")]
    return _stack([num_rows * (gap / gap.sum()) for gap in gaps], np.float32)


@array_function
def counts(rows: kinds.DrawnRows, num_rows: int) -> Float32[Array, "members rows"]:
    """How often each row occurs in the rows of each member: converts rows to weights.

    **Arguments:**

    - `rows`: row indices `(members, n)`.
    - `num_rows`: the number of rows, `len(x)`.

    **Returns:** weights `(members, rows)`, whole numbers, which sum to `n` for each member.

    ```python
    ee.resample.counts(jnp.array([[0, 2, 2]]), 4)  # [[1, 0, 2, 0]]

    # draws whole groups: six rows of three patients
    groups = np.array([0, 0, 0, 1, 2, 2])
    drawn = ee.resample.bootstrap(3, 8, key=key)
    ee.resample.counts(drawn, 3)[:, groups].shape  # (8, 6)
    ```
    """
    return jax.vmap(lambda own: jnp.zeros(num_rows, jnp.float32).at[own].add(1))(rows)


@array_function
def out_of_bag(rows: kinds.DrawnRows, num_rows: int) -> Bool[Array, "members rows"]:
    """The rows that each member was not trained on.

    **Arguments:** as for [`eqx_ensemble.resample.counts`][]. Of weights `(members, rows)` they are `weights == 0`.

    **Returns:** booleans `(members, rows)`.

    ```python
    ee.resample.out_of_bag(jnp.array([[0, 2, 2]]), 4)  # [[False, True, False, True]]
    ```
    """
    return jax.vmap(lambda own: jnp.ones(num_rows, bool).at[own].set(False))(rows)


class HeldOut(NamedTuple):
    """Predictions for every row by members that were not trained on it.

    - `mean`: `(rows, ...)`, the mean over these members; NaN for rows without one.
    - `num_members`: `(rows,)`, the number of these members.
    """

    mean: Float[Array, "rows ..."]
    num_members: Int32[Array, " rows"]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def held_out_mean(predictions: kinds.RowPredictions, unseen: kinds.Unseen, *, weights: kinds.Weights = None) -> HeldOut:
    """The mean over the members that were not trained on each row: held-out predictions without a held-out set.

    **Arguments:**

    - `predictions`: `(members, rows, ...)`, of all members for all rows; for classes, probabilities.
    - `unseen`: booleans `(members, rows)`, the rows that a member was not trained on: of bootstraps and subsets
        [`eqx_ensemble.resample.out_of_bag`][], of folds `folds.in_test`.
    - `weights`: over members, `(members,)`, normalised for each row over the members that held it out.

    **Returns:** [`eqx_ensemble.resample.HeldOut`][].

    ```python
    # two members, three rows
    predictions = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    rows = jnp.array([[0, 0], [0, 1]])  # what they were trained on
    # mean [nan, 2, 16.5], num_members [0, 1, 2]
    ee.resample.held_out_mean(predictions, ee.resample.out_of_bag(rows, 3))
    ```
    """
    share = unseen.astype(predictions.dtype) if weights is None else jnp.where(unseen, weights[:, None], 0)
    total = jnp.sum(share, axis=0)
    # Divided first: the share of a single member is exactly 1, and its prediction is returned bit for bit.
    share = share / jnp.where(total == 0, 1, total)[None]
    share = jnp.expand_dims(share, range(2, predictions.ndim))
    mean = weighted_mean(jnp.where(share == 0, 0, predictions), share)
    return HeldOut(jnp.where(jnp.any(share > 0, axis=0), mean, jnp.nan), jnp.sum(unseen, axis=0, dtype=jnp.int32))


class Folds(NamedTuple):
    """The training and test rows of each member: one split of the data per member.

    - `train`: row indices `(members, train)` for `fit(..., rows=folds.train)`, as many for every member.
    - `test`: row indices `(members, test)`; shorter test parts are padded with their last row.
    - `valid`: `(members, test)`, `False` where `test` is padded.
    - `in_train`, `in_test`: booleans `(members, rows)`, the exact parts: rows that `train` drops are in `in_train`.
    """

    train: Int32[Array, "members train"]
    test: Int32[Array, "members test"]
    valid: Bool[Array, "members test"]
    in_train: Bool[Array, "members rows"]
    in_test: Bool[Array, "members rows"]

    def __repr__(self) -> str:
        return brief_repr(self)


def folds(num_rows: int, num_folds: int, *, key: Any = None) -> Folds:
    """Cross-validation: member `i` is tested on fold `i`, and trained on the other folds.

    If `num_folds` does not divide `num_rows`, some training parts have one extra row, and `train` drops one of
    their rows, a different one for each member. For classes, groups and series see
    [`eqx_ensemble.resample.from_splits`][].

    **Arguments:**

    - `num_rows`: the number of rows, `len(x)`.
    - `num_folds`: the number of folds and of members, from 2 to the number of rows.
    - `key`: one key, to shuffle the rows; without it, folds are consecutive rows.

    **Returns:** [`eqx_ensemble.resample.Folds`][], with one member per fold.

    ```python
    folds = ee.resample.folds(100, 5, key=key)
    folds.train.shape  # (5, 80)
    ```
    """
    check_positive_int(num_rows, "num_rows")
    if not 2 <= check_positive_int(num_folds, "num_folds") <= num_rows:
        got, fix = f"got {num_folds} folds of {num_rows} rows", "Each fold has at least one row."
        raise value_error("`num_folds` from 2 to the number of rows", got, fix)
    order = np.arange(num_rows)
    if key is not None:
        order = np.random.RandomState(key_words(key, 1, purpose="folds")[0]).permutation(num_rows)
    parts = map(np.sort, np.array_split(order, num_folds))
    return from_splits([(np.setdiff1d(order, part), part) for part in parts], num_rows)


def from_splits(
    splits: Iterable[tuple[Any, Any]], num_rows: int, *, uneven: Literal["trim", "repeat"] | None = None
) -> Folds:
    """Folds from a scikit-learn splitter or any `(train, test)` row indices: one split per member.

    **Arguments:**

    - `splits`: pairs of integer arrays `(train, test)`, such as `splitter.split(x, y)`.
    - `num_rows`: the number of rows, `len(x)`.
    - `uneven`: for training parts that differ by more than one row, such as those of `TimeSeriesSplit` and
        `GroupKFold`, `"trim"` drops rows of longer parts, `"repeat"` repeats rows of shorter parts, both evenly
        spaced. With either, weights `in_train` train on exactly the rows of each split.

    **Returns:** [`eqx_ensemble.resample.Folds`][], with one member per split.

    **Raises:** `ValueError` for no splits, a row in both parts of a split, and training parts that require `uneven`.

    ```python
    from sklearn.model_selection import RepeatedStratifiedKFold

    labels = np.arange(60) % 3
    splits = RepeatedStratifiedKFold(n_splits=5, n_repeats=4).split(labels, labels)
    ee.resample.from_splits(splits, 60).train.shape  # (20, 48)
    ```
    """
    rows = np.arange(num_rows)
    trains, tests = zip(*([rows[np.asarray(part)] for part in split] for split in splits), strict=True)
    short, long = min(map(len, trains)), max(map(len, trains))
    if uneven is None and long - short > 1:
        fix = 'Drop rows of the longer ones, `uneven="trim"`, or repeat rows of the shorter ones, `uneven="repeat"`.'
        raise value_error("training parts that differ by one row at most", f"got {short} to {long} rows", fix)
    length, longest = long if uneven == "repeat" else short, max(map(len, tests))
    # Dropped and repeated rows are evenly spaced, from a different one for each member.
    places = lambda i, own: np.sort((np.arange(length) * own // length + i * own // len(trains)) % own)
    train = [part[places(i, len(part))] for i, part in enumerate(trains)]
    test = [np.pad(part, (0, longest - len(part)), mode="edge") for part in tests]
    valid = np.arange(longest) < np.array([[len(part)] for part in tests])
    in_train, in_test = np.zeros((2, len(trains), num_rows), bool)
    for i, split in enumerate(zip(trains, tests, strict=True)):
        in_train[i, split[0]], in_test[i, split[1]] = True, True
        if (both := in_train[i] & in_test[i]).any():
            got = f"got row {both.argmax()} in both parts of split {i}"
            raise value_error("test rows that are held out", got, "Splits are pairs `(train, test)`.")
    return Folds(_stack(train, np.int32), _stack(test, np.int32), *map(jnp.asarray, (valid, in_train, in_test)))


def _count(size: Any, num_rows: Any) -> int:
    """The number of rows per member."""
    check_positive_int(num_rows, "num_rows")
    is_share = isinstance(size, float | np.floating)
    return check_positive_int(round(float(check_number(size, "size")) * num_rows) if is_share else size, "size")


def _stack(drawn: list[np.ndarray], dtype: Any) -> Array:
    return jnp.asarray(np.stack(drawn).astype(dtype))
