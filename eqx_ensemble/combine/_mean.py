import jax
from jaxtyping import Array, ArrayLike, Float, Real

from .. import _weighting
from .._check import check_values, check_weights
from .._weighting import blank_unweighted, known_mean


def mean(
    values: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Float[Array, "..."]:
    r"""The weighted mean over members of any array, $\sum_m w_m v_m$.

    For class probabilities from logits use [`eqx_ensemble.combine.mixture`][]: the mean of logits is different.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. Half precision is computed and returned in float32.
    - `weights`: convex weights over members, `(members,)`; divided by their sum, equal if not given. Members of weight
        zero are ignored, even if they are NaN: the gradients of their values and weights are zero. Weights per row,
        such as those of a mixture-of-experts gate, are `(members, *rows)`, where `rows` are the leading axes of the
        values after `members`; they are normalised in each row.

    **Returns:**

    The mean, of the shape of one member's values.

    **Raises:**

    - `TypeError` for values that are not floating-point.
    - `ValueError` for values without members, and weights that are mismatched, negative, not finite or all zero.

    ```python
    values = jnp.array([[1.0, 2.0], [4.0, 8.0]])
    ee.combine.mean(values)  # [2.5, 5.0]
    ee.combine.mean(values, weights=jnp.array([2, 1]))  # [2.0, 4.0]
    ee.combine.mean(values, weights=jnp.array([[2, 0], [1, 1]]))  # [2.0, 8.0]
    ```
    """
    name = "combine.mean"
    checked = check_values(name, "values", values)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype, rows=checked.shape[1:])
    return _mean(checked, convex)


def log_mixture(
    log_densities: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Float[Array, "..."]:
    r"""The logarithm of the mixture of the members' densities, $\log \sum_m w_m p_m$.

    For densities of any kind, evaluated at the same points, without normalisation. For distributions over classes see
    [`eqx_ensemble.combine.mixture`][], for Gaussians [`eqx_ensemble.scores.nll_gaussian_mixture`][].

    **Arguments:**

    - `log_densities`: natural logarithms of densities or probabilities, `(members, ...)`.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.

    **Returns:**

    Log-densities, of the shape of one member's.

    **Raises:**

    As [`eqx_ensemble.combine.mean`][].

    ```python
    ee.combine.log_mixture(jnp.log(jnp.array([[0.5], [0.1]])))  # log(0.3)
    ```
    """
    name = "combine.log_mixture"
    checked = check_values(name, "log_densities", log_densities)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype, rows=checked.shape[1:])
    return _log_mixture(checked, convex)


@jax.jit
def _mean(values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None) -> Float[Array, "..."]:
    return known_mean(values, weights)


@jax.jit
def _log_mixture(
    log_densities: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None
) -> Float[Array, "..."]:
    return _weighting.log_mixture(blank_unweighted(log_densities, weights), weights)
