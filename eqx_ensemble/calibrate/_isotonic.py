from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from .._brief import brief_doc
from .._caller import caller
from .._check import RowWeightsLike, check_positive_int, check_word, missing_extra_message
from ..scores._engine import Binning, bin_rows
from ._pooling import Pool, Pooling, Rows, check_smoothing, check_untraced, fit_rows


class Histogram(eqx.Module):
    """Fitted histogram binning.

    **Attributes:**

    - `edges`: the inner edges of the bins, `(groups, classes, bins - 1)`; an edge belongs to the bin below it.
    - `frequency`: `(groups, classes, bins)`, the frequency of the class in each bin; NaN for empty bins.
    - `pooling`: that of the fit.
    """

    edges: Float[Array, "groups classes edges"]
    frequency: Float[Array, "groups classes bins"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        probabilities = jnp.exp(self.pooling.logs(logits))
        return by_class(_frequency_of, probabilities, self.edges, self.frequency)


def histogram(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    num_bins: int = 15,
    binning: Binning = "mass",
    smoothing: float | int = 0.0,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Histogram:
    r"""Histogram binning: each probability is replaced by the class's frequency in its bin of held-out rows.

    Probabilities in empty bins are unchanged.

    **Arguments:**

    - `logits`, `labels`, `pool`, `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.platt`][].
    - `num_bins`: the number of bins per class.
    - `binning`: `"mass"`, bins with equal numbers of rows; `"width"`, bins of equal width.
    - `smoothing`: additive smoothing $s \ge 0$: the frequency of $k$ rows of the class among $n$ rows of a bin
        becomes $(k + s) / (n + C s)$ for $C$ classes. With zero, log-probabilities may be minus infinity.

    **Returns:**

    [`eqx_ensemble.calibrate.Histogram`][].

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4]))
    fitted = ee.calibrate.histogram(
        logits, jnp.array([0, 0, 0, 1]), pool="mixture", num_bins=1
    )
    jnp.exp(fitted(logits))[0, 0]  # [0.75, 0.25]
    ```

    ??? cite
        [Zadrozny and Elkan 2001](https://dl.acm.org/doi/10.5555/645530.655658)
    """
    check_positive_int(num_bins, "num_bins")
    check_word(binning, "binning", ("width", "mass"))
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    edges, frequency = _fit_histogram(rows, check_smoothing(smoothing), num_bins, binning)
    return Histogram(edges, frequency, pooling)


@partial(jax.jit, static_argnames=("num_bins", "binning"))
def _fit_histogram(rows: Rows, smoothing: ArrayLike, num_bins: int, binning: Binning) -> tuple[Array, Array]:
    num_classes = rows.logs.shape[-1]
    truth = jax.nn.one_hot(rows.labels, rows.logs.shape[-1], dtype=rows.logs.dtype)

    def of_class(p: Array, hits: Array) -> tuple[Array, Array]:
        bins = bin_rows(p, hits, rows.weights, num_bins, binning)
        count = jnp.where(bins.count == 0, 1, bins.count)
        # Not from `count * frequency`: without smoothing the frequency is kept bit for bit.
        found = bins.frequency + (1 - num_classes * bins.frequency) * smoothing / (count + num_classes * smoothing)
        return bins.edges, jnp.where(bins.count == 0, jnp.nan, found)

    each = jax.vmap(of_class, in_axes=(1, 1))
    return jax.vmap(each, in_axes=(0, None))(jnp.exp(rows.logs), truth)


def _frequency_of(p: Float[Array, "*batch"], edges: Float[Array, " edges"], frequency: Float[Array, " bins"]) -> Array:
    found = frequency[jnp.searchsorted(edges, p, side="left")]
    return jnp.where(jnp.isnan(found), p, found)


@partial(jax.jit, static_argnames="calibrated")
def by_class(
    calibrated, probabilities: Float[Array, "groups *batch classes"], first: Array, second: Array
) -> Float[Array, "groups *batch classes"]:
    """Log-probabilities from calibrating each class's probability against the rest."""
    # A search in knots or edges puts NaN after the last.
    known = lambda p, *fitted: jnp.where(jnp.isnan(p), p, calibrated(p, *fitted))
    each = jax.vmap(jax.vmap(known, in_axes=(-1, 0, 0), out_axes=-1))
    if probabilities.shape[-1] == 2:
        second_class = each(probabilities[..., 1:], first[:, 1:], second[:, 1:])
        return jnp.log(jnp.concatenate([1 - second_class, second_class], axis=-1))
    values = each(probabilities, first, second)
    total = jnp.sum(values, axis=-1, keepdims=True)
    return jnp.log(jnp.where(total == 0, 1 / values.shape[-1], values / jnp.where(total == 0, 1, total)))


class Isotonic(eqx.Module):
    """Fitted isotonic calibration, in plain arrays: calls do not need scikit-learn.

    **Attributes:**

    - `knots`, `values`: the increasing function of each class, `(groups, classes, knots)`: linear between knots and
        constant beyond the first and the last, which is repeated for classes with fewer knots.
    - `pooling`: that of the fit.
    """

    knots: Float[Array, "groups classes knots"]
    values: Float[Array, "groups classes knots"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        probabilities = jnp.exp(self.pooling.logs(logits))
        return by_class(jnp.interp, probabilities, self.knots, self.values)


def isotonic(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    smoothing: float | int = 0.0,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Isotonic:
    """Isotonic calibration: an increasing function of the probabilities, fitted to held-out labels.

    It is scikit-learn's `IsotonicRegression` for each class.

    **Arguments:**

    - `logits`, `labels`, `pool`, `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.platt`][], but concrete: fit
        outside `jax.jit`.
    - `smoothing`: as for [`eqx_ensemble.calibrate.histogram`][], of the steps of the function; steps that cross are
        joined.

    **Returns:**

    [`eqx_ensemble.calibrate.Isotonic`][].

    **Raises:**

    - `TypeError` for traced arrays; `ImportError` without scikit-learn: `pip install 'eqx_ensemble[sklearn]'`.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 3 + [[0.4, 0.6]] * 2]))
    fitted = ee.calibrate.isotonic(logits, jnp.array([0, 0, 1, 1, 1]), pool="mixture")
    jnp.exp(fitted(logits))[0, ::3]  # [[0.667, 0.333], [0.0, 1.0]]
    ```

    ??? cite
        [Zadrozny and Elkan 2002](https://doi.org/10.1145/775047.775151)
    """
    check_untraced(logits=logits, labels=labels, weights=weights, row_weights=row_weights)
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    knots, values = _fit(rows, check_smoothing(smoothing))
    return Isotonic(knots, values, pooling)


def _fit(rows: Rows, smoothing: float) -> tuple[Array, Array]:
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "scikit-learn", "sklearn")) from error
    kept = np.asarray(rows.weights) > 0
    own = np.asarray(rows.weights, np.float64)[kept]
    probabilities, labels = np.asarray(jnp.exp(rows.logs))[:, kept], np.asarray(rows.labels)[kept]
    knots, values = [], []
    for group in probabilities:
        # scikit-learn merges probabilities within the resolution of their dtype, 1e-6 in float32.
        for c, p in enumerate(group.T.astype(np.float64)):
            fitted = IsotonicRegression(out_of_bounds="clip").fit(p, labels == c, sample_weight=own)
            if smoothing > 0:
                fitted.fit(p, *_smooth(fitted.predict(p), own, probabilities.shape[-1], smoothing))
            knots.append(fitted.X_thresholds_)
            values.append(fitted.y_thresholds_)
    shape = (*probabilities.shape[::2], -1)
    return _fill_up(knots, shape, rows.logs.dtype), _fill_up(values, shape, rows.logs.dtype)


def _smooth(steps: np.ndarray, own: np.ndarray, num_classes: int, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """The smoothed frequency of the step of each row, and the row's share of the smoothed row count."""
    _, step = np.unique(steps, return_inverse=True)
    count = np.bincount(step, own)[step]
    whole = count + num_classes * smoothing
    return (count * steps + smoothing) / whole, own * whole / count


def _fill_up(parts: list[np.ndarray], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Stacks parts of different lengths; shorter parts are padded with their last value."""
    longest = max(map(len, parts))
    padded = [np.pad(part, (0, longest - len(part)), mode="edge") for part in parts]
    return jnp.asarray(np.reshape(padded, shape), dtype)
