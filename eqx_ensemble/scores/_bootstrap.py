import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, Real

from .._boundary import array_function, counted_rows, kinds
from .._brief import brief_repr
from .._check import check_array, check_level, type_error, value_error
from .._keys import member_keys
from .._leaves import kind_text


def per_member(score: Callable[..., Array], *arrays: ArrayLike, **options: object) -> Array:
    """The score of each member, as an ensemble of one.

    **Arguments:**

    - `score`: a score of predictions with a `members` axis, or a function of your own that JAX can trace. Others are
        mapped directly: `jax.vmap(scores.nll_gaussian, in_axes=(0, 0, None))(mean, variance, targets)`.
    - `arrays`: its arguments: predictions `(members, ...)`, and last the target, shared by all members.
    - `options`: its keyword arguments, but no `weights`.

    **Returns:**

    `(members,)`, or `(members, *batch)` with `reduction="none"`.

    ```python
    logits = jnp.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 1.0]]])
    ee.scores.per_member(ee.scores.accuracy, logits, jnp.array([0, 1]))  # [1.0, 0.5]
    ```
    """
    predictions, target = [check_array("predictions", values) for values in arrays[:-1]], arrays[-1]
    counts = {prediction.shape[:1] for prediction in predictions}
    if len(counts) > 1 or counts & {(), (0,)}:
        shapes = ", ".join(str(prediction.shape) for prediction in predictions)
        needs = "predictions with equally many members, at least one"
        fix = "All arrays but the last are predictions with a leading `members` axis; the last is the target."
        raise value_error(needs, f"got shapes {shapes}", fix)

    def alone(*one):
        return score(*(prediction[None] for prediction in one), target, **options)

    return jax.vmap(alone)(*predictions)


class Bootstrap(NamedTuple):
    """A statistic with its bootstrap standard error and interval.

    - `estimate`: the statistic of the original rows.
    - `standard_error`: its standard deviation over the draws (ddof 1).
    - `lower`, `upper`: the central interval of a fraction `level` of the draws.
    """

    estimate: Float[Array, "..."]
    standard_error: Float[Array, "..."]
    lower: Float[Array, "..."]
    upper: Float[Array, "..."]

    def __repr__(self) -> str:
        return brief_repr(self)


def bootstrap(
    values: Float[ArrayLike, "*scores rows"],
    statistic: Callable[[Array], Array] | None = None,
    *,
    row_weights: Bool[ArrayLike, " rows"] | Real[ArrayLike, " rows"] | None = None,
    level: float = 0.9,
    num_draws: int = 1000,
    key: Any,
) -> Bootstrap:
    r"""Bootstrap standard error and interval of the mean of any score over rows.

    To compare two models, pass the difference of their scores: its standard error is usually far smaller than that of
    either. Several scores share the same draws of rows.

    **Arguments:**

    - `values`: `(*scores, rows)`, a score with `reduction="none"`. First average dependent rows, such as repeated
        measurements.
    - `statistic`: a function of the means `(*scores,)`: for squared errors `jnp.sqrt`, or
        `lambda m: jnp.sqrt(m[0]) - jnp.sqrt(m[1])` for the difference of two.
    - `row_weights`: as for every score, `(rows,)`.
    - `level`: the fraction of the draws between `lower` and `upper`.
    - `num_draws`: the number of draws $n$. The relative error of the standard error is about $1 / \sqrt{2 n}$.
    - `key`: one random key.

    **Returns:**

    [`eqx_ensemble.scores.Bootstrap`][].

    ```python
    targets = jnp.linspace(-1, 1, 50)
    one, other = (
        ee.scores.crps_gaussian(targets * 0, targets * 0 + v, targets, reduction="none")
        for v in (0.3, 1.0)
    )
    gain = ee.scores.bootstrap(other - one, key=jax.random.key(0))
    # several standard errors above zero: the first is better
    gain.estimate, gain.standard_error
    ```

    ??? cite
        [Efron, AoS 1979](https://doi.org/10.1214/aos/1176344552)
    """
    check_level(level)
    if statistic is not None and not callable(statistic):
        fix = "To compare two models pass the difference of their scores: `bootstrap(other - one, key=key)`."
        raise type_error("`statistic` to be a function", f"got {kind_text(statistic)}", fix)
    array = check_array("values", values)
    if array.ndim == 0:
        raise value_error("one of `values` per row", "got a number", 'Take the score with `reduction="none"`.')
    mean, shifts = _draw(jnp.moveaxis(array, -1, 0), row_weights=row_weights, num_draws=num_draws, key=key)
    return _summarise(mean, shifts, level, statistic)


@array_function
def _draw(
    values: kinds.RowScores, *, row_weights: kinds.RowScoreWeights, num_draws: int, key: Any
) -> tuple[Float[Array, "*scores"], Float[Array, " draws *scores"]]:
    """The means of the scores, and those of each draw, relative to them."""
    sample = _sample(jnp.moveaxis(values, 0, -1), row_weights)
    return sample.mean, _shifts(sample, member_keys(key, num_draws, purpose="scores.bootstrap"))


class _Sample(NamedTuple):
    """The mean of the scores, and the rows to draw from.

    - `rest`: the scores without their mean, times the weights. A large common offset is subtracted before the draws:
        its rounding would exceed the differences between them.
    - `weights`, `num_kept`: the weights, and the number of rows that are not ignored, which come first; `None` for all.
    """

    mean: Float[Array, "*scores"]
    rest: Float[Array, "*scores rows"]
    weights: Float[Array, " rows"] | None
    num_kept: Int[Array, ""] | None


def _sample(values: Float[Array, "*scores rows"], row_weights: Array | None) -> _Sample:
    if row_weights is None:
        mean = jnp.mean(values, axis=-1)
        return _Sample(mean, values - mean[..., None], None, None)
    order = jnp.argsort(~counted_rows(row_weights), stable=True)
    weights, values = row_weights[order].astype(values.dtype), values[..., order]
    share = _along(weights, values)
    values = jnp.where(share == 0, 0, values)
    mean = jnp.sum(values * share, axis=-1) / jnp.sum(weights)
    return _Sample(mean, (values - mean[..., None]) * share, weights, jnp.sum(weights > 0, dtype=jnp.int32))


def _shifts(sample: _Sample, keys: Key[Array, " draws"]) -> Float[Array, " draws *scores"]:
    """The mean of each draw, relative to that of all rows."""
    num_rows = sample.rest.shape[-1]
    count = num_rows if sample.num_kept is None else sample.num_kept
    used = jnp.arange(num_rows, dtype=jnp.int32) < count

    def shift(key: Array) -> Array:
        drawn = jax.random.randint(key, (num_rows,), 0, count, dtype=jnp.int32)
        if sample.weights is None:
            return jnp.mean(sample.rest[..., drawn], axis=-1)
        total = lambda rows: jnp.sum(jnp.where(_along(used, rows), rows[..., drawn], 0), axis=-1)
        return total(sample.rest) / total(sample.weights)

    return jax.lax.map(shift, keys)


@ft.partial(jax.jit, static_argnames="statistic")
def _summarise(
    mean: Float[Array, "*scores"],
    shifts: Float[Array, " draws *scores"],
    level: Any,
    statistic: Callable[[Array], Array] | None,
) -> Bootstrap:
    if statistic is None:
        estimate, draws, offset = mean, shifts, mean
    else:
        estimate = statistic(mean)
        draws, offset = jax.vmap(lambda moved: statistic(mean + moved))(shifts), 0
    tail = (1 - level) / 2
    lower, upper = jnp.quantile(draws, jnp.asarray([tail, 1 - tail], draws.dtype), axis=0)
    return Bootstrap(estimate, jnp.std(draws, axis=0, ddof=1), lower + offset, upper + offset)


def _along(row: Array, values: Array) -> Array:
    """One number per row, reshaped to broadcast with scores `(*scores, rows)`."""
    return jnp.reshape(row, (1,) * (values.ndim - 1) + row.shape)
