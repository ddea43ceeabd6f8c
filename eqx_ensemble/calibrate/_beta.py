import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._weighting import class_log_odds
from ._check import check_not_separable
from ._newton import Regression, minimise_logistic, standardise
from ._one_against_rest import Labels, along_classes, each_class, log_complement, normalise
from ._pooling import Pool, Pooling, Rows, fit_rows

_FACES = np.array([[True, True, True], [True, False, True], [False, True, True], [False, False, True]])
"""The faces of the feasible set: which of a, b and c are free; the others are zero."""


class Beta(eqx.Module):
    """Fitted beta calibration: call it on the logits of the same members.

    **Attributes:**

    - `a`, `b`, `c`: `(groups, classes)`, one group per member or one for the mixture; 1, 1 and 0 are the identity.
    - `pooling`: the predictions to calibrate: `.pool`, and the `.weights` of the mixture.
    """

    a: Float[Array, "groups classes"]
    b: Float[Array, "groups classes"]
    c: Float[Array, "groups classes"]
    pooling: Pooling

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(members, *batch, classes)`, or `(1, *batch, classes)` for the mixture."""
        name = "calibrate.Beta"
        logs = self.pooling.logs(name, logits)
        a, b, c = (along_classes(name, x, logs) for x in (self.a, self.b, self.c))
        return normalise(a * logs + b * log_complement(logs, class_log_odds(logs)) + c)


def beta(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Beta:
    r"""Beta calibration: log-odds $a \ln p - b \ln(1 - p) + c$ with $a, b \ge 0$, fitted by maximum likelihood.

    These are the log-odds of a class if its probability has one Beta distribution in rows of the class and another in
    other rows. Unlike Platt scaling, it leaves calibrated probabilities unchanged ($a = b = 1$, $c = 0$), and corrects
    high and low probabilities separately, but it needs more rows. The constrained minimum is exact: the best of those
    with $a$, $b$, both or neither equal to zero. For more than two classes, each class is calibrated against the rest,
    and the results of a row are normalised.

    **Arguments:**

    As for [`eqx_ensemble.calibrate.platt`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Beta`][], a Module: `fitted(logits)` returns log-probabilities with a leading axis of
    length `members`, or 1 for the mixture. The fit is differentiated as an implicit function.

    **Raises:**

    As [`eqx_ensemble.calibrate.temperature`][]; no optimum exists if the probabilities of a class separate its rows
    from the others, or if all rows or no rows are of the class. While tracing, the parameters are then NaN.

    ```python
    p = jnp.array([0.2, 0.2, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9])
    logits = jnp.log(jnp.stack([1 - p, p], axis=-1))[None]
    labels = jnp.array([0, 1, 0, 1, 0, 1, 1, 1])
    fitted = ee.calibrate.beta(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::2, 1]  # [0.47, 0.54, 0.75, 0.75]
    ```

    ??? cite
        [Beta calibration: a well-founded and easily implemented improvement on logistic calibration for binary
        classifiers](https://proceedings.mlr.press/v54/kull17a.html)

        ```bibtex
        @inproceedings{kull2017beta,
            author={Meelis Kull and Telmo {Silva Filho} and Peter Flach},
            title={Beta calibration: a well-founded and easily implemented improvement on logistic calibration for
                binary classifiers},
            booktitle={International Conference on Artificial Intelligence and Statistics},
            year={2017},
        }
        ```
    """
    name = "calibrate.beta"
    pooling, rows = fit_rows(name, logits, labels, pool, weights, mask)
    found = _fit(rows)
    check_not_separable(name, pool, jnp.isnan(found[..., 0]) & ~jnp.any(jnp.isnan(rows.logs), axis=1))
    return Beta(found[..., 0], found[..., 1], found[..., 2], pooling)


@jax.jit
def _fit(rows: Rows) -> Float[Array, "groups classes 3"]:
    # For two classes, the first has the probabilities 1 - p.
    mirror = lambda found: jnp.stack([found[..., 1], found[..., 0], -found[..., 2]], axis=-1)
    return each_class(_fit_class, rows, mirror)


def _fit_class(logs: Float[Array, " rows"], odds: Float[Array, " rows"], labels: Labels) -> Float[Array, "3"]:
    features, mean, scale = standardise(jnp.stack([logs, log_complement(logs, odds)], axis=1), labels.share)
    features = jnp.concatenate([features, jnp.ones_like(features[:, :1])], axis=1)
    rows = Regression(features, labels.hits.astype(odds.dtype), labels.share)
    params, losses = jax.vmap(minimise_logistic, in_axes=(None, 0))(rows, jnp.asarray(_FACES))
    # The constrained minimum is the unconstrained minimum of its face; the last face is always feasible.
    feasible = jnp.all(params[:, :2] >= 0, axis=1) & jnp.isfinite(losses)
    best = params[jnp.argmin(jnp.where(feasible, losses, jnp.inf))]
    slopes = best[:2] / scale
    found = jnp.append(slopes, best[2] - jnp.sum(slopes * mean))
    return jnp.where(_is_separable(odds, labels), jnp.nan, found)


def _is_separable(odds: Float[Array, " rows"], labels: Labels) -> Bool[Array, ""]:
    """Whether no row of the others has a higher probability than a row of the class: the loss then has no minimum."""
    counts = labels.share > 0
    least = lambda rows: jnp.min(jnp.where(rows & counts, odds, jnp.inf))
    most = lambda rows: jnp.max(jnp.where(rows & counts, odds, -jnp.inf))
    differ = most(counts) > least(counts)
    one_class = jnp.isinf(least(labels.hits)) | jnp.isinf(least(~labels.hits))
    return one_class | (differ & (most(~labels.hits) <= least(labels.hits)))
