import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._weighting import class_log_odds
from ._newton import Regression, minimise_logistic, standardise
from ._one_against_rest import Labels, along_classes, each_class, normalise
from ._pooling import Pool, Pooling, Rows, fit_rows


class Platt(eqx.Module):
    """Fitted Platt scaling: call it on the logits of the same members.

    **Attributes:**

    - `slope`, `offset`: `(groups, classes)`, one group per member or one for the mixture: calibrated log-odds are
        `slope` times the log-odds of a class, plus `offset`.
    - `pooling`: the predictions to calibrate: `.pool`, and the `.weights` of the mixture.
    """

    slope: Float[Array, "groups classes"]
    offset: Float[Array, "groups classes"]
    pooling: Pooling

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(members, *batch, classes)`, or `(1, *batch, classes)` for the mixture."""
        name = "calibrate.Platt"
        odds = class_log_odds(self.pooling.logs(name, logits))
        slope, offset = (along_classes(name, x, odds) for x in (self.slope, self.offset))
        return normalise(slope * odds + offset)


def platt(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Platt:
    r"""Platt scaling: a logistic regression of the labels on the log-odds of a class.

    $p = 1 / (1 + \exp(-(a s + b)))$ for the log-odds $s$, with Platt's targets $(N_+ + 1) / (N_+ + 2)$ and $1 / (N_- +
    2)$ instead of 1 and 0: a minimum then also exists for separable rows. The loss is convex and is minimised by
    Newton's method. For more than two classes, each class is calibrated against the rest, and the results of a row are
    normalised, as in scikit-learn.

    **Arguments:**

    - `logits`: logits or log-probabilities of rows that the members were not trained on, `(members, *batch, classes)`.
        For binary probabilities `p` pass `jnp.log(jnp.stack([1 - p, p], axis=-1))`, for binary logits
        `jnp.stack([jnp.zeros_like(logit), logit], axis=-1)`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `pool`: `"members"` calibrates each member separately; combine them afterwards. `"mixture"` combines the members
        first, and calibrates the mixture.
    - `weights`: convex weights over members in the mixture, `(members,)`; stored in the result.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.calibrate.Platt`][], a Module: `fitted(logits)` returns log-probabilities with a leading axis of
    length `members`, or 1 for the mixture. A negative slope reverses the order of predictions. The fit is
    differentiated as an implicit function.

    **Raises:**

    As [`eqx_ensemble.calibrate.temperature`][], except for missing optima.

    ```python
    # one member with 90 % confidence, right in three of four rows
    logits = jnp.log(jnp.array([[[0.9, 0.1], [0.1, 0.9]] * 20]))
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 0] * 5)
    fitted = ee.calibrate.platt(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, 0]  # [0.727, 0.273]: smoothed targets, not quite three of four
    ```

    ??? cite
        Platt, *Probabilistic Outputs for Support Vector Machines and Comparisons to Regularized Likelihood Methods*,
        Advances in Large Margin Classifiers, 1999; numerics:
        [A note on Platt's probabilistic outputs for support vector
        machines](https://doi.org/10.1007/s10994-007-5018-6)
    """
    pooling, rows = fit_rows("calibrate.platt", logits, labels, pool, weights, mask)
    found = _fit(rows)
    return Platt(found[..., 0], found[..., 1], pooling)


@jax.jit
def _fit(rows: Rows) -> Float[Array, "groups classes 2"]:
    # For two classes, the first has the opposite log-odds: the same slope and the opposite offset.
    mirror = lambda found: found * jnp.asarray([1, -1], found.dtype)[None, None]
    return each_class(_fit_class, rows, mirror)


def _fit_class(logs: Float[Array, " rows"], odds: Float[Array, " rows"], labels: Labels) -> Float[Array, "2"]:
    counts = lambda rows: jnp.sum(rows & (labels.share > 0)).astype(odds.dtype)
    positive, negative = counts(labels.hits), counts(~labels.hits)
    targets = jnp.where(labels.hits, (positive + 1) / (positive + 2), 1 / (negative + 2))
    scaled, mean, scale = standardise(odds[:, None], labels.share)
    features = jnp.concatenate([scaled, jnp.ones_like(scaled)], axis=1)
    (slope, offset), _ = minimise_logistic(Regression(features, targets, labels.share), jnp.ones(2, bool))
    return jnp.stack([slope / scale[0], offset - slope * mean[0] / scale[0]])
