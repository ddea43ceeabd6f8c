from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .. import _weighting
from .._check import check_values, check_weights
from .._combination import Summary, by_rows, check_one_values, stream
from .._weighting import blank_unweighted, known_mean
from ._gaussian import Gaussian
from ._mean import mean


def moments(
    values: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Gaussian:
    r"""Mean and variance over members of point predictions, entry by entry.

    $\mu = \sum_m w_m v_m$ and $\sigma^2 = \sum_m w_m (v_m - \mu)^2$ (ddof 0). Deviations are computed before they are
    squared, so a large common offset costs no precision. In the streaming form, groups of members with weights $w_g$,
    means $\mu_g$ and variances $v_g$ are merged into $\mu = \sum_g w_g \mu_g$ and $\sum_g w_g (v_g + (\mu_g - \mu)^2)$
    (Chan et al.; for single members this is Welford's method). Rounding errors of the mean are compensated: precision
    does not depend on the number of groups.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. For members that predict a variance see
        [`eqx_ensemble.combine.gaussian`][] and [`eqx_ensemble.uncertainty.decompose_variance`][].
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.

    **Returns:**

    A named tuple with `.mean` and `.variance`, of the shape of one member's values.

    **Raises:**

    As [`eqx_ensemble.combine.mean`][].

    ```python
    ee.combine.moments(jnp.array([[1.0], [3.0]]))  # mean [2.0], variance [1.0]
    ```

    ??? cite
        [Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances](https://doi.org/10.1007/978-3-642-51461-6_3)

        ```bibtex
        @inproceedings{chan1982updating,
            author={Tony F. Chan and Gene H. Golub and Randall J. LeVeque},
            title={Updating Formulae and a Pairwise Algorithm for Computing Sample Variances},
            booktitle={COMPSTAT 1982},
            year={1982},
        }
        ```
    """
    name = "combine.moments"
    checked = check_values(name, "values", values)
    convex = check_weights(name, weights, checked.shape[0], checked.dtype, rows=checked.shape[1:])
    return Gaussian(*by_rows(_moments, checked, (), convex))


def _moments(
    values: Float[Array, "members ..."], _: tuple, weights: Float[Array, "members ..."] | None
) -> tuple[Array, Array]:
    return _weighting.moments(blank_unweighted(values, weights), weights)


class _Centre(NamedTuple):
    """A mean in two parts: the rounded mean and its accumulated rounding error."""

    mean: Float[Array, "..."]
    rest: Float[Array, "..."]


def _merge_centres(centres: _Centre, weights: Float[Array, " groups"]) -> tuple[_Centre, Array]:
    """The centre of two groups, and the difference between their centres.

    A compensated sum: the mean is accurate to the last digit after a thousand merges.
    """
    (first, second), (left_out, also) = (blank_unweighted(part, weights) for part in centres)
    gap = (second - first) + (also - left_out)
    step = left_out + weights[1] * gap
    found = first + step
    taken = found - first
    rest = (first - (found - taken)) + (step - taken)
    plain = known_mean(centres.mean, weights)  # infinities have no rounding error
    finite = jnp.isfinite(found)
    return _Centre(jnp.where(finite, found, plain), jnp.where(finite, rest, 0)), gap


def _centre_of_members(values: Float[Array, "members ..."], weights: Any) -> _Centre:
    found = known_mean(values, weights)
    return _Centre(found, jnp.zeros_like(found))


def _moments_of_members(values: Float[Array, "members ..."], weights: Any) -> tuple[_Centre, Array]:
    found, variance = _moments(values, (), weights)
    return _Centre(found, jnp.zeros_like(found)), variance


def _moments_of_groups(groups: tuple[_Centre, Array], weights: Float[Array, " groups"]) -> tuple[_Centre, Array]:
    centres, variances = groups
    centre, gap = _merge_centres(centres, weights)
    return centre, known_mean(variances, weights) + weights[1] * (1 - weights[1]) * gap**2


stream(
    mean,
    Summary(
        "combine.mean",
        check_one_values,
        _centre_of_members,
        lambda groups, weights: _merge_centres(groups, weights)[0],
        lambda centre: centre.mean,
        in_blocks=False,
    ),
)
stream(
    moments,
    Summary(
        "combine.moments",
        check_one_values,
        _moments_of_members,
        _moments_of_groups,
        lambda summary: Gaussian(summary[0].mean, summary[1]),
    ),
)
