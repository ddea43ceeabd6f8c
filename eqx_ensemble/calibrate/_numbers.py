"""The predictions to calibrate: those of each member, or of their mixture as an ensemble of one."""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import array_function, kinds, mean_of_rows
from .._brief import brief_doc
from .._caller import caller
from .._check import check_fitted_members, concrete, missing_extra_message, type_error, value_error
from .._leaves import as_column, is_traced
from .._weighting import class_mixture, is_class, mixture_moments
from ..combine import Gaussian

Pool = Literal["members", "mixture"]


class Pooling(eqx.Module):
    """What is calibrated: the predictions of each member, or their mixture as an ensemble of one.

    **Attributes:**

    - `weights`: those of the mixture, `(members,)`, or `None`.
    - `pool`: `"members"` or `"mixture"`.
    - `num_members`: of the fit.
    """

    weights: Float[Array, " members"] | None
    pool: Pool = eqx.field(static=True)
    num_members: int = eqx.field(static=True)

    __pdoc__ = brief_doc

    def __check_init__(self) -> None:
        if self.weights is not None and self.pool == "members":
            fix = "Each member is calibrated separately: weight the members when you combine them."
            raise value_error('`weights` only with `pool="mixture"`', 'got both `weights` and `pool="members"`', fix)

    def logs(self, logits: Float[Array, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """The log-probabilities to calibrate, with one group per member, or one for the mixture."""
        check_fitted_members(self.num_members, logits.shape[0])
        if self.pool == "members":
            return jax.nn.log_softmax(logits, axis=-1)
        return class_mixture(logits, self.weights)[None]

    def moments(self, mean: Array, variance: Array) -> tuple[Array, Array]:
        """The means and variances to calibrate."""
        check_fitted_members(self.num_members, mean.shape[0])
        if self.pool == "members":
            return mean, variance
        mean, variance = mixture_moments(mean, variance, self.weights)
        return mean[None], variance[None]


class FlatRows(NamedTuple):
    """What a calibration is fitted to: log-probabilities, whether each class is the label, and shares of the rows."""

    logs: Float[Array, "groups rows classes"]
    hits: np.ndarray
    share: np.ndarray
    pooling: Pooling

    @property
    def mask(self) -> np.ndarray:
        """Whether each row has a nonzero weight."""
        return self.share > 0


def flat_rows(logits: Any, labels: Any, pool: Pool, weights: Any, row_weights: Any) -> FlatRows:
    """Checks the arguments of a fit, which is done on the host."""
    for name, x in {"logits": logits, "labels": labels, "weights": weights, "row_weights": row_weights}.items():
        if is_traced(x):
            fix = "Fit outside `jax.jit`; the fitted Module can be called inside."
            raise type_error(f"a concrete `{name}`", "got a traced array", fix)
    logs, own, counts, pooling = _pool_rows(logits, labels, pool=pool, weights=weights, row_weights=row_weights)
    hits, share = np.arange(logs.shape[-1]) == np.asarray(own)[:, None], np.asarray(counts, np.float64)
    if row_weights is not None:  # as they were given: Platt's targets depend on how many rows there are
        share = np.where(share > 0, np.ravel(np.asarray(concrete(row_weights), np.float64)), 0)
    return FlatRows(logs, hits, share, pooling)


@array_function
def _pool_rows(
    logits: kinds.FiniteLogits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> tuple[Array, Array, Array, Pooling]:
    pooling = Pooling(weights, pool, logits.shape[0])
    logs = pooling.logs(logits)
    counts = jnp.ones(labels.shape, logs.dtype) if row_weights is None else row_weights.astype(logs.dtype)
    counts = jnp.where(is_class(labels, logs.shape[-1]), counts, 0)
    return logs.reshape(logs.shape[0], -1, logs.shape[-1]), jnp.ravel(labels), jnp.ravel(counts), pooling


class Variance(eqx.Module):
    """Fitted variance scaling.

    **Attributes:**

    - `scale`: the factor of the variances, `(groups,)`; above 1 for overconfident predictions.
    - `pooling`: that of the fit.
    """

    scale: Float[Array, " groups"]
    pooling: Pooling

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, mean: kinds.Samples, variance: kinds.Variances) -> Gaussian:
        """Means and calibrated variances, `(groups, *batch)`, as `.mean` and `.variance`."""
        means, variances = self.pooling.moments(mean, variance)
        return Gaussian(means, variances * as_column(self.scale, means.ndim).astype(means.dtype))


def _finish(out: Variance, _: dict[str, Any]) -> Variance:
    host = concrete(out.scale)
    if host is not None and (wrong := ~(np.isfinite(host) & (host > 0))).any():
        first = int(np.argmax(wrong))
        whose = f"member {first}: " if out.pooling.pool == "members" else ""
        fix = "Exclude members by `weights`, and rows by `row_weights`. Or are the targets the predictions themselves?"
        got = f"{whose}the factor would be {host[first]}"
        raise value_error("finite means and variances, and targets that differ from the predicted means", got, fix)
    return out


@array_function(finish=_finish)
def variance(
    mean: kinds.Samples,
    variance: kinds.Variances,
    targets: kinds.FiniteTargets,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Variance:
    r"""Variance scaling: variances are multiplied by a factor, fitted to held-out targets by maximum likelihood.

    For a Gaussian, the factor is the mean of $(y - \mu)^2 / \sigma^2$ over all entries. Means are unchanged. For one
    factor per output, fit each output separately.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape, for rows that the members were not trained on. Variances
        above zero.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `pool`: `"members"` fits one factor per member; combine them afterwards. `"mixture"` first combines the members by
        [`eqx_ensemble.combine.gaussian`][], whose variance includes their disagreement.
    - `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Variance`][].

    **Raises:**

    - `ValueError` for variances that are not positive, and targets that all equal their means.

    ```python
    mean, variance, targets = jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.array([2.0, -2.0])
    fitted = ee.calibrate.variance(mean, variance, targets, pool="mixture")
    fitted(mean, variance).variance  # [[4.0, 4.0]]
    ```

    ??? cite
        [Laves et al. 2020](https://arxiv.org/abs/2104.12376)
    """
    pooling = Pooling(weights, pool, jnp.shape(mean)[0])
    means, variances = pooling.moments(mean, variance)
    errors = (targets[None] - means) ** 2 / variances
    scale = jax.vmap(lambda of_group: mean_of_rows(of_group, row_weights))(errors)
    return Variance(scale, pooling)


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

    @array_function
    def __call__(self, logits: kinds.Logits) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        p = jnp.exp(self.pooling.logs(logits))
        of_class = jax.vmap(jnp.interp, in_axes=(-1, 0, 0), out_axes=-1)
        found = jax.vmap(of_class)(p, self.knots.astype(p.dtype), self.values.astype(p.dtype))
        found = jnp.where(jnp.isnan(p), p, found)  # interpolation puts NaN after the last knot
        total = jnp.sum(found, axis=-1, keepdims=True)
        return jnp.log(jnp.where(total == 0, 1 / p.shape[-1], found / jnp.where(total == 0, 1, total)))


def isotonic(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    pool: Pool,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Isotonic:
    """Isotonic calibration: an increasing function of the probabilities, fitted to held-out labels.

    It is scikit-learn's `IsotonicRegression` for each class. With few rows it gives probabilities of zero, whose
    negative log-likelihood may be infinite.

    **Arguments:** as for [`eqx_ensemble.calibrate.platt`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Isotonic`][].

    **Raises:**

    - `ImportError` without scikit-learn: `pip install -e '.[sklearn]'`.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 3 + [[0.4, 0.6]] * 2]))
    fitted = ee.calibrate.isotonic(logits, jnp.array([0, 0, 1, 1, 1]), pool="mixture")
    jnp.exp(fitted(logits))[0, ::3]  # [[0.667, 0.333], [0.0, 1.0]]
    ```

    ??? cite
        [Zadrozny and Elkan 2002](https://doi.org/10.1145/775047.775151)
    """
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "scikit-learn", "sklearn")) from error
    rows = flat_rows(logits, labels, pool, weights, row_weights)
    kept, fits = rows.mask, []
    for group in np.asarray(jnp.exp(rows.logs), np.float64)[:, kept]:
        # scikit-learn merges probabilities within the resolution of their dtype, 1e-6 in float32.
        for p, hits in zip(group.T, rows.hits[kept].T, strict=True):
            fits.append(IsotonicRegression(out_of_bounds="clip").fit(p, hits, sample_weight=rows.share[kept]))
    longest = max(len(fit.X_thresholds_) for fit in fits)
    pad = lambda x: np.pad(x, (0, longest - len(x)), mode="edge")
    stack = lambda parts: jnp.asarray(np.reshape([pad(x) for x in parts], (*rows.logs.shape[::2], -1)), rows.logs.dtype)
    knots, values = stack([fit.X_thresholds_ for fit in fits]), stack([fit.y_thresholds_ for fit in fits])
    return Isotonic(knots, values, rows.pooling)
