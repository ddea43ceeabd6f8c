from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Num, Real

from .._brief import brief_repr
from .._check import check_values, check_weights, check_word, kind_text, type_error, value_error
from ._check import check_drawn, check_num_rows
from ._folds import Folds
from ._weights import count_rows


def check_held_out(predictions: ArrayLike, shape: tuple[int, ...] | None = None, axes: str = "rows") -> Array:
    """Raises unless predictions are `(members, rows, ...)`. Returns them in the compute dtype."""
    array = check_values("predictions", predictions)
    if array.ndim < 2:
        fix = "One member? Add a leading axis: `predictions[None]`."
        raise value_error("`predictions` of shape (members, rows, ...)", f"got shape {array.shape}", fix)
    if shape is not None and array.shape[:2] != shape:
        fix = 'Predictions of all rows are `rows="all"`, of `folds.test` alone `rows="test"`.'
        got = f"expected ({shape[0]}, {shape[1]}, ...), got {array.shape}"
        raise value_error(f"`predictions` (members, {axes}, ...) of the members and rows of the folds", got, fix)
    return array


def check_folds(value: Any) -> None:
    """Raises unless the argument is a `Folds`."""
    if not isinstance(value, Folds):
        fix = "For other splits use `from_splits(splits, num_rows)`."
        raise type_error("`folds` to be a `Folds`", f"got {kind_text(value)}", fix)


class HeldOut(NamedTuple):
    """Predictions for every row by members that were not trained on it.

    - `mean`: `(rows, ...)`, the mean over these members; NaN for rows without one.
    - `num_members`: `(rows,)`, the number of these members.
    """

    mean: Float[Array, "rows ..."]
    num_members: Int32[Array, " rows"]

    __repr__ = brief_repr


def out_of_bag(
    drawn: Num[ArrayLike, "members n"] | Bool[ArrayLike, "members n"], num_rows: int
) -> Bool[Array, "members rows"]:
    """The rows that each member was not trained on.

    **Arguments:**

    - `drawn`: the training rows of the members: integers are row indices `(members, n)`; floats and booleans are
        weights `(members, rows)`, where 0 is out of bag.
    - `num_rows`: the number of rows, `len(x)`.

    **Returns:**

    Booleans `(members, rows)`.

    ```python
    ee.resample.out_of_bag(jnp.array([[0, 2, 2]]), 4)  # [[False, True, False, True]]
    ee.resample.out_of_bag(jnp.array([[0.5, 0.0, 2.5]]), 3)  # [[False, True, False]]
    ```
    """
    num_rows = check_num_rows(num_rows)
    return _unseen(check_drawn(drawn, num_rows), num_rows)


def out_of_bag_mean(
    predictions: Float[ArrayLike, "members rows ..."],
    drawn: Num[ArrayLike, "members n"] | Bool[ArrayLike, "members n"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> HeldOut:
    """The mean over the members that were not trained on each row: held-out predictions without a held-out set.

    **Arguments:**

    - `predictions`: floating-point, `(members, rows, ...)`, of all members for all rows; for classes, probabilities.
    - `drawn`: the training rows of the members, as in [`eqx_ensemble.resample.out_of_bag`][].
    - `weights`: over members, `(members,)`, normalised for each row over the members that held it out.

    **Returns:**

    [`eqx_ensemble.resample.HeldOut`][].

    ```python
    # two members, three rows
    predictions = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    rows = jnp.array([[0, 0], [0, 1]])  # what they were trained on
    # mean [nan, 2, 16.5], num_members [0, 1, 2]
    ee.resample.out_of_bag_mean(predictions, rows)
    ```
    """
    checked = check_held_out(predictions)
    num_members, num_rows = checked.shape[:2]
    sample = check_drawn(drawn, num_rows, num_members=num_members)
    convex = check_weights(weights, num_members, checked.dtype)
    return _held_out(checked, _unseen(sample, num_rows), convex)


def out_of_fold(
    predictions: Float[ArrayLike, "members rows ..."],
    folds: Folds,
    *,
    rows: Literal["all", "test"] = "all",
    weights: Real[ArrayLike, " members"] | None = None,
) -> HeldOut:
    """The prediction for every row by the member that held it out; the mean if there are several.

    **Arguments:**

    - `predictions`: floating-point, `(members, rows, ...)` or `(members, test, ...)`; for classes, probabilities.
    - `folds`: [`eqx_ensemble.resample.Folds`][].
    - `rows`: the rows of the predictions: `"all"`, or `"test"`, those of `predict(ensemble, Each(x[folds.test]))`,
        at the cost of one model.
    - `weights`: over members, `(members,)`, normalised for each row over the members that held it out.

    **Returns:**

    [`eqx_ensemble.resample.HeldOut`][].

    ```python
    folds = ee.resample.folds(4, 2)
    predictions = jnp.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    ee.resample.out_of_fold(predictions, folds).mean  # [1, 2, 30, 40]
    ```
    """
    check_folds(folds)
    check_word(rows, "rows", ("all", "test"))
    shape, axes = (folds.in_test.shape, "rows") if rows == "all" else (folds.test.shape, "test")
    checked = check_held_out(predictions, shape, axes)
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    return _held_out(checked, folds.in_test, convex) if rows == "all" else _scatter_mean(checked, folds, convex)


@partial(jax.jit, static_argnames="num_rows")
def _unseen(drawn: Num[Array, "members n"] | Bool[Array, "members n"], num_rows: int) -> Bool[Array, "members rows"]:
    if jnp.issubdtype(drawn.dtype, jnp.integer):
        return count_rows(drawn, num_rows) == 0
    return ~drawn.astype(bool)


@jax.jit
def _held_out(
    predictions: Float[Array, "members rows ..."],
    unseen: Bool[Array, "members rows"],
    weights: Float[Array, " members"] | None,
) -> HeldOut:
    share, used = _shares(unseen, weights, predictions.dtype)
    total = jnp.sum(share, axis=0)
    # Divided first: the share of a single member is exactly 1, and its prediction is returned bit for bit.
    share = _like(share / jnp.where(total == 0, 1, total)[None], predictions)
    mean = jnp.sum(jnp.where(share == 0, 0, predictions) * share, axis=0)
    num_members = jnp.sum(used, axis=0, dtype=jnp.int32)
    return HeldOut(jnp.where(_like(num_members, mean) == 0, jnp.nan, mean), num_members)


@jax.jit
def _scatter_mean(
    predictions: Float[Array, "members test ..."], folds: Folds, weights: Float[Array, " members"] | None
) -> HeldOut:
    num_rows = folds.in_test.shape[1]
    share, used = _shares(folds.valid, weights, predictions.dtype)
    at_rows = lambda x: jnp.zeros((num_rows, *x.shape[2:]), x.dtype).at[folds.test].add(x)
    total = at_rows(share)[folds.test]
    share = _like(share / jnp.where(total == 0, 1, total), predictions)
    mean = at_rows(jnp.where(share == 0, 0, predictions) * share)
    num_members = at_rows(used.astype(jnp.int32))
    return HeldOut(jnp.where(_like(num_members, mean) == 0, jnp.nan, mean), num_members)


def _shares(
    unseen: Bool[Array, "members n"], weights: Float[Array, " members"] | None, dtype: jnp.dtype
) -> tuple[Float[Array, "members n"], Bool[Array, "members n"]]:
    """The members' weights for rows that they held out, and whether these are nonzero."""
    if weights is None:
        return unseen.astype(dtype), unseen
    share = jnp.where(unseen, weights[:, None], 0)
    return share, share > 0


def _like(values: Array, other: Array) -> Array:
    return jnp.reshape(values, values.shape + (1,) * (other.ndim - values.ndim))
