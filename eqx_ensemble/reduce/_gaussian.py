from typing import Any

from jaxtyping import PyTree

from .. import _check, combine
from ._reduction import AbstractSummary


class Gaussian(AbstractSummary):
    """The Gaussian with mean and variance of the mixture of the members', as [`eqx_ensemble.combine.gaussian`][].

    Predictions are a pair of a mean and a variance, each `(members, ...)`; the result is an
    [`eqx_ensemble.combine.Gaussian`][]. For the two parts of the variance see
    [`eqx_ensemble.reduce.DecomposeVariance`][].

    ```python
    mean, variance = jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.5]])
    ee.reduce.Gaussian()((mean, variance))  # mean [2.0], variance [1.5]
    ```
    """

    event_ndim = 0

    def checked(self, predictions: PyTree) -> PyTree:
        """Predictions as they are computed with."""
        name = "reduce.Gaussian"
        return _check.check_moments(name, *_check.pair_of_moments(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> combine.Gaussian:
        """Mean and variance of the mixture of members."""
        return combine.gaussian(*predictions, weights=weights)

    def of_groups(self, summaries: PyTree, weights: Any) -> combine.Gaussian:
        """The same of groups: a mixture of mixtures."""
        return combine.gaussian(*summaries, weights=weights)

    def result(self, summary: PyTree) -> combine.Gaussian:
        """Mean and variance."""
        return summary
