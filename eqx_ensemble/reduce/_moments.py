from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _check, _weighting, combine, uncertainty
from ..combine import Gaussian
from ..uncertainty import Decomposition
from ._reduction import AbstractSummary


class _Centre(NamedTuple):
    """A mean in two parts: the rounded one, and what rounding has left out so far."""

    mean: Float[Array, "..."]
    rest: Float[Array, "..."]


def _merged_centre(centres: _Centre, weights: Float[Array, " groups"]) -> tuple[_Centre, Array, Array]:
    """The centre of two groups, the difference of theirs, and the second one's share of the weight.

    A compensated sum: after a thousand merges the mean is still right to its last digit.
    """
    (first, second), (left_out, also) = (_weighting.blank_unweighted(part, weights) for part in centres)
    share = (weights[1] / jnp.sum(weights)).astype(first.dtype)
    gap = (second - first) + (also - left_out)
    step = left_out + share * gap
    mean = first + step
    taken = mean - first
    rest = (first - (mean - taken)) + (step - taken)
    plain = combine.mean(centres.mean, weights=weights)  # infinities have no rest
    finite = jnp.isfinite(mean)
    return _Centre(jnp.where(finite, mean, plain), jnp.where(finite, rest, 0)), gap, share


class Mean(AbstractSummary):
    """The mean over members, as [`eqx_ensemble.combine.mean`][], of predictions `(members, ...)`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((100, 3)), combine=ee.reduce.Mean()).shape  # (100, 2)
    ```
    """

    in_blocks = False
    event_ndim = 0

    def checked(self, predictions: PyTree) -> PyTree:
        """Predictions as they are computed with."""
        name = "reduce.Mean"
        return _check.check_values(name, "predictions", _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> _Centre:
        """The mean of members."""
        mean = combine.mean(predictions, weights=weights)
        return _Centre(mean, jnp.zeros_like(mean))

    def of_groups(self, summaries: PyTree, weights: Any) -> _Centre:
        """The mean of means."""
        return _merged_centre(summaries, weights)[0]

    def result(self, summary: PyTree) -> Float[Array, "..."]:
        """The mean."""
        return summary.mean


class Moments(AbstractSummary):
    r"""Mean and variance (ddof 0) over members of point predictions `(members, ...)`.

    Groups of members with weights $w_g$, means $\mu_g$ and variances $v_g$ merge into $\mu = \sum_g w_g \mu_g$ and
    $\sum_g w_g (v_g + (\mu_g - \mu)^2)$ (Chan et al.; member by member this is Welford's method): deviations are formed
    before they are squared, and what rounding leaves out of a mean is kept, so that a large common offset costs no
    precision, however many groups there are. The result is an
    [`eqx_ensemble.combine.Gaussian`][], a named tuple with `.mean` and `.variance`. For members that predict a variance
    themselves see [`eqx_ensemble.reduce.DecomposeVariance`][].

    ```python
    ee.reduce.Moments()(jnp.array([[1.0], [3.0]]))  # mean [2.0], variance [1.0]
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

    event_ndim = 0

    def checked(self, predictions: PyTree) -> PyTree:
        """Predictions as they are computed with."""
        name = "reduce.Moments"
        return _check.check_values(name, "predictions", _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> tuple[_Centre, Array]:
        """Mean and variance of members."""
        convex = _check.check_weights("reduce.Moments", weights, predictions.shape[0], predictions.dtype)
        mean, variance = _weighting.moments(_weighting.blank_unweighted(predictions, convex), convex)
        return _Centre(mean, jnp.zeros_like(mean)), variance

    def of_groups(self, summaries: PyTree, weights: Any) -> tuple[_Centre, Array]:
        """Mean and variance of groups from theirs."""
        centres, variances = summaries
        centre, gap, share = _merged_centre(centres, weights)
        return centre, combine.mean(variances, weights=weights) + share * (1 - share) * gap**2

    def result(self, summary: PyTree) -> Gaussian:
        """Mean and variance."""
        centre, variance = summary
        return Gaussian(centre.mean, variance)


class DecomposeVariance(AbstractSummary):
    """The variance of the mixture in two parts, as [`eqx_ensemble.uncertainty.decompose_variance`][].

    Predictions are a pair of a mean and a variance, each `(members, ...)`; the result is an
    [`eqx_ensemble.uncertainty.Decomposition`][].

    ```python
    mean, variance = jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.7]])
    ee.reduce.DecomposeVariance()((mean, variance))  # total [1.6], aleatoric [0.6], epistemic [1.0]
    ```
    """

    event_ndim = 0

    def checked(self, predictions: PyTree) -> PyTree:
        """Predictions as they are computed with."""
        name = "reduce.DecomposeVariance"
        return _check.check_moments(name, *_check.pair_of_moments(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> tuple[Gaussian, Array]:
        """The moments of the members' means, and the mean of their variances."""
        means, variances = predictions
        parts = uncertainty.decompose_variance(means, variances, weights=weights)
        return Gaussian(combine.mean(means, weights=weights), parts.epistemic), parts.aleatoric

    def of_groups(self, summaries: PyTree, weights: Any) -> tuple[Gaussian, Array]:
        """The same of groups."""
        means, variances = summaries
        return combine.gaussian(*means, weights=weights), combine.mean(variances, weights=weights)

    def result(self, summary: PyTree) -> Decomposition:
        """The two parts and their sum."""
        (_, epistemic), aleatoric = summary
        return Decomposition(aleatoric + epistemic, aleatoric, epistemic)
