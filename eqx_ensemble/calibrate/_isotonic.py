import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import Labels, Logits, RowWeights, Weights, array_function
from .._brief import brief_doc
from .._caller import caller
from .._check import missing_extra_message
from ._pool import Pool, Pooling, rows_of


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
    def __call__(self, logits: Logits) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        p = jnp.exp(self.pooling.logs(logits))
        of_class = jax.vmap(jnp.interp, in_axes=(-1, 0, 0), out_axes=-1)
        found = jax.vmap(of_class)(p, self.knots.astype(p.dtype), self.values.astype(p.dtype))
        found = jnp.where(jnp.isnan(p), p, found)  # interpolation puts NaN after the last knot
        total = jnp.sum(found, axis=-1, keepdims=True)
        return jnp.log(jnp.where(total == 0, 1 / p.shape[-1], found / jnp.where(total == 0, 1, total)))


def isotonic(
    logits: Logits, labels: Labels, *, pool: Pool, weights: Weights = None, row_weights: RowWeights = None
) -> Isotonic:
    """Isotonic calibration: an increasing function of the probabilities, fitted to held-out labels.

    It is scikit-learn's `IsotonicRegression` for each class. With few rows it gives probabilities of zero, whose
    negative log-likelihood may be infinite.

    **Arguments:** as for [`eqx_ensemble.calibrate.platt`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Isotonic`][].

    **Raises:**

    - `ImportError` without scikit-learn: `pip install 'eqx_ensemble[sklearn]'`.

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
    rows = rows_of(logits, labels, pool, weights, row_weights)
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
