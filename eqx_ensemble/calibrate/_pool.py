"""The predictions to calibrate: those of each member, or of their mixture as an ensemble of one."""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import FiniteLogits, Labels, RowWeights, Weights, array_function
from .._brief import brief_doc
from .._check import check_fitted_members, concrete, is_traced, type_error, value_error
from .._weighting import class_mixture, is_class, mixture_moments

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


class Rows(NamedTuple):
    """What a calibration is fitted to: log-probabilities, whether each class is the label, and shares of the rows."""

    logs: Float[Array, "groups rows classes"]
    hits: np.ndarray
    share: np.ndarray
    pooling: Pooling

    @property
    def mask(self) -> np.ndarray:
        """Whether each row has a nonzero weight."""
        return self.share > 0


def rows_of(logits: Any, labels: Any, pool: Pool, weights: Any, row_weights: Any) -> Rows:
    """Checks the arguments of a fit, which is done on the host."""
    for name, x in {"logits": logits, "labels": labels, "weights": weights, "row_weights": row_weights}.items():
        if is_traced(x):
            fix = "Fit outside `jax.jit`; the fitted Module can be called inside."
            raise type_error(f"a concrete `{name}`", "got a traced array", fix)
    logs, own, counts, pooling = _pool_rows(logits, labels, pool=pool, weights=weights, row_weights=row_weights)
    hits, share = np.arange(logs.shape[-1]) == np.asarray(own)[:, None], np.asarray(counts, np.float64)
    if row_weights is not None:  # as they were given: Platt's targets depend on how many rows there are
        share = np.where(share > 0, np.ravel(np.asarray(concrete(row_weights), np.float64)), 0)
    return Rows(logs, hits, share, pooling)


@array_function
def _pool_rows(
    logits: FiniteLogits, labels: Labels, *, pool: Pool, weights: Weights = None, row_weights: RowWeights = None
) -> tuple[Array, Array, Array, Pooling]:
    pooling = Pooling(weights, pool, logits.shape[0])
    logs = pooling.logs(logits)
    counts = jnp.ones(labels.shape, logs.dtype) if row_weights is None else row_weights.astype(logs.dtype)
    counts = jnp.where(is_class(labels, logs.shape[-1]), counts, 0)
    return logs.reshape(logs.shape[0], -1, logs.shape[-1]), jnp.ravel(labels), jnp.ravel(counts), pooling
