import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import missing_extra_message
from ._check import check_smoothing, check_untraced
from ._histogram import by_class
from ._pooling import Pool, Pooling, Rows, fit_rows


class Isotonic(eqx.Module):
    """Fitted isotonic calibration: call it on the logits of the same members.

    **Attributes:**

    - `knots`, `values`: the increasing function of each class, `(groups, classes, knots)`: linear between knots and
        constant beyond the first and the last, which is repeated for classes with fewer knots.
    - `pooling`: the predictions to calibrate: `.pool`, and the `.weights` of the mixture.
    """

    knots: Float[Array, "groups classes knots"]
    values: Float[Array, "groups classes knots"]
    pooling: Pooling

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(members, *batch, classes)`, or `(1, *batch, classes)` for the mixture."""
        probabilities = jnp.exp(self.pooling.logs("calibrate.Isotonic", logits))
        return by_class(jnp.interp, probabilities, self.knots, self.values)


def isotonic(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    smoothing: float | int = 0.0,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Isotonic:
    """Isotonic calibration: an increasing function of the probabilities, fitted to held-out labels.

    Each class is calibrated against the rest by scikit-learn's `IsotonicRegression`
    (`pip install 'eqx_ensemble[sklearn]'`), and the results of a row are normalised, to the uniform distribution if all
    are zero, as in scikit-learn's `CalibratedClassifierCV`. For two classes, only the second is fitted. The result
    contains plain arrays: calls do not need scikit-learn.

    **Arguments:**

    - `logits`: logits or log-probabilities of rows that the members were not trained on, `(members, *batch, classes)`.
        They must be concrete: fit outside `jax.jit`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `pool`: `"members"` calibrates each member separately; combine them afterwards. `"mixture"` combines the members
        first, and calibrates the mixture.
    - `smoothing`: additive (Laplace) smoothing $s$: the frequency of $k$ rows of the class among $n$ rows of a step
        becomes $(k + s) / (n + C s)$ for $C$ classes. With zero, the default, a class without rows in a step has
        probability zero there, and the negative log-likelihood of a later row of this class is infinite. The function
        remains increasing: steps that cross are joined.
    - `weights`: convex weights over members in the mixture, `(members,)`; stored in the result.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.calibrate.Isotonic`][], a Module: `fitted(logits)` returns log-probabilities with a leading axis of
    length `members`, or 1 for the mixture; minus infinity where the probability is zero, which smoothing prevents.

    **Raises:**

    As [`eqx_ensemble.calibrate.temperature`][], except for missing optima; also `TypeError` for traced arrays,
    `ValueError` for negative smoothing, and `ImportError` without scikit-learn.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 3 + [[0.4, 0.6]] * 2]))
    fitted = ee.calibrate.isotonic(logits, jnp.array([0, 0, 1, 1, 1]), pool="mixture")
    jnp.exp(fitted(logits))[0, ::3]  # [[0.667, 0.333], [0.0, 1.0]]
    ```

    ??? cite
        [Transforming classifier scores into accurate multiclass probability
        estimates](https://doi.org/10.1145/775047.775151)

        ```bibtex
        @inproceedings{zadrozny2002transforming,
            author={Bianca Zadrozny and Charles Elkan},
            title={Transforming classifier scores into accurate multiclass probability estimates},
            booktitle={International Conference on Knowledge Discovery and Data Mining},
            year={2002},
        }
        ```
    """
    name = "calibrate.isotonic"
    check_untraced(name, logits=logits, labels=labels, weights=weights, mask=mask)
    pooling, rows = fit_rows(name, logits, labels, pool, weights, mask)
    knots, values = _fit(name, rows, check_smoothing(smoothing, name=name))
    return Isotonic(knots, values, pooling)


def _fit(name: str, rows: Rows, smoothing: float) -> tuple[Array, Array]:
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError as error:
        raise ImportError(missing_extra_message(name, "scikit-learn", "sklearn")) from error
    kept = np.asarray(rows.share) > 0
    probabilities, labels = np.asarray(jnp.exp(rows.logs))[:, kept], np.asarray(rows.labels)[kept]
    knots, values = [], []
    for group in probabilities:
        # scikit-learn merges probabilities within the resolution of their dtype, 1e-6 in float32.
        for c, p in enumerate(group.T.astype(np.float64)):
            fitted = IsotonicRegression(out_of_bounds="clip").fit(p, labels == c)
            if smoothing > 0:
                fitted.fit(p, *_smooth(fitted.predict(p), probabilities.shape[-1], smoothing))
            knots.append(fitted.X_thresholds_)
            values.append(fitted.y_thresholds_)
    shape = (*probabilities.shape[::2], -1)
    return _fill_up(knots, shape, rows.logs.dtype), _fill_up(values, shape, rows.logs.dtype)


def _smooth(steps: np.ndarray, num_classes: int, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """The smoothed frequency of the step of each row, and the row's share of the smoothed row count."""
    _, step, count = np.unique(steps, return_inverse=True, return_counts=True)
    count = count[step]
    whole = count + num_classes * smoothing
    return (count * steps + smoothing) / whole, whole / count


def _fill_up(parts: list[np.ndarray], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Stacks parts of different lengths; shorter parts are padded with their last value."""
    longest = max(map(len, parts))
    padded = [np.pad(part, (0, longest - len(part)), mode="edge") for part in parts]
    return jnp.asarray(np.reshape(padded, shape), dtype)
