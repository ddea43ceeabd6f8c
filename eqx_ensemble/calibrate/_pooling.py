from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from .._check import check_fitted_members, check_labels, check_logits, check_mask, check_weights
from .._weighting import blank_masked, blank_unweighted, is_class, log_mixture
from ..scores._check import check_some_rows
from ._check import check_finite_logits, check_pool

Pool = Literal["members", "mixture"]


class Pooling(eqx.Module):
    """The predictions to calibrate: each member separately, or their mixture as an ensemble of one.

    **Attributes:**

    - `pool`: `"members"` or `"mixture"`.
    - `num_members`: the number of members.
    - `weights`: the weights of the mixture, `(members,)`, or `None`.
    """

    pool: Pool = eqx.field(static=True)
    num_members: int = eqx.field(static=True)
    weights: Float[Array, " members"] | None

    def logs(self, name: str, logits: ArrayLike) -> Float[Array, "groups *batch classes"]:
        """The log-probabilities to calibrate, with one group per member, or one for the mixture."""
        checked = check_logits(name, logits)
        check_fitted_members(name, self.num_members, checked.shape[0])
        return _logs(checked, self.weights, self.pool)


class Rows(NamedTuple):
    """Log-probabilities, labels and weights in the mean, with all rows on one axis."""

    logs: Float[Array, "groups rows classes"]
    labels: Integer[Array, " rows"]
    share: Float[Array, " rows"]


def fit_rows(
    name: str, logits: ArrayLike, labels: ArrayLike, pool: Pool, weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Pooling, Rows]:
    """The predictions to calibrate and the rows to fit on; masked rows and invalid labels have weight zero."""
    checked = check_logits(name, logits)
    kept = check_mask(name, mask, checked.shape[1:-1])
    targets = check_labels(name, labels, checked, mask)
    pooling = make_pooling(name, pool, weights, checked)
    check_some_rows(name, targets.shape)
    check_finite_logits(name, checked, pooling.weights, mask)
    # While tracing, invalid labels raise no error.
    known = is_class(targets, checked.shape[-1])
    kept = known if kept is None else kept & known
    logs = _logs(blank_masked(checked, kept, before=1), pooling.weights, pool)
    rows, share = jnp.ravel(blank_masked(targets, kept)), _shares(kept, logs.dtype)
    return pooling, Rows(jnp.reshape(logs, (logs.shape[0], -1, logs.shape[-1])), rows, share)


def make_pooling(name: str, pool: Pool, weights: ArrayLike | None, predictions: Array) -> Pooling:
    """The pooling of predictions with a leading `members` axis."""
    check_pool(name, pool, weighted=weights is not None)
    num_members = predictions.shape[0]
    return Pooling(pool, num_members, check_weights(name, weights, num_members, predictions.dtype))


def _shares(kept: Bool[Array, "*batch"], dtype: jnp.dtype) -> Float[Array, " rows"]:
    return jnp.ravel(kept).astype(dtype) / jnp.sum(kept).astype(dtype)


def _logs(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None, pool: Pool
) -> Float[Array, "groups *batch classes"]:
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    return logs if pool == "members" else log_mixture(logs, weights)[None]
