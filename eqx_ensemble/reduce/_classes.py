from typing import Any, NamedTuple

from jaxtyping import Array, Float, PyTree

from .. import _check, _weighting, combine, uncertainty
from ..uncertainty import Decomposition
from ._reduction import AbstractSummary


class Mixture(AbstractSummary):
    """Log-probabilities of the mixture of the members, as [`eqx_ensemble.combine.mixture`][].

    Predictions are logits `(members, *batch, classes)`; log-probabilities may be passed as they are.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 5, 8, 1, key=key), 4, key=key)
    ee.predict(ensemble, jnp.ones((100, 3)), combine=ee.reduce.Mixture()).shape  # (100, 5)
    ```
    """

    event_ndim = 1

    def checked(self, predictions: PyTree) -> PyTree:
        """Logits as they are computed with."""
        name = "reduce.Mixture"
        return _check.check_logits(name, _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The mixture of members."""
        return combine.mixture(predictions, weights=weights)

    def of_groups(self, summaries: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The mixture of mixtures."""
        return combine.mixture(summaries, weights=weights)

    def result(self, summary: PyTree) -> Float[Array, "*batch classes"]:
        """Log-probabilities."""
        return summary


class MeanLogits(AbstractSummary):
    """Log-probabilities of the mean of the members' logits, as [`eqx_ensemble.combine.mean_logits`][].

    Predictions are logits `(members, *batch, classes)`; log-probabilities give the same. That those of a group
    are normalised, by one constant per row, changes no mean over groups.

    ```python
    ee.reduce.MeanLogits()(jnp.log(jnp.array([[0.9, 0.1], [0.5, 0.5]])))  # log([0.75, 0.25])
    ```
    """

    event_ndim = 1

    def checked(self, predictions: PyTree) -> PyTree:
        """Logits as they are computed with."""
        name = "reduce.MeanLogits"
        return _check.check_logits(name, _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The normalised mean of members."""
        return combine.mean_logits(predictions, weights=weights)

    def of_groups(self, summaries: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The mean of means."""
        return combine.mean_logits(summaries, weights=weights)

    def result(self, summary: PyTree) -> Float[Array, "*batch classes"]:
        """Log-probabilities."""
        return summary


class Vote(AbstractSummary):
    """The share of the members' votes that each class gets, as [`eqx_ensemble.combine.vote`][].

    Predictions are logits `(members, *batch, classes)`.

    ```python
    ee.reduce.Vote()(jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]]))  # [0.667, 0.333]
    ```
    """

    event_ndim = 1

    def checked(self, predictions: PyTree) -> PyTree:
        """Logits as they are computed with."""
        name = "reduce.Vote"
        return _check.check_logits(name, _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The shares of members."""
        return combine.vote(predictions, weights=weights)

    def of_groups(self, summaries: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The shares of all groups."""
        return combine.mean(summaries, weights=weights)

    def result(self, summary: PyTree) -> Float[Array, "*batch classes"]:
        """The shares."""
        return summary


class Disagreement(AbstractSummary):
    r"""The probability that two members, each drawn by its weight, vote for different classes.

    $1 - \sum_c v_c^2$ with $v_c$ the share of the votes for class $c$. Pairs of a member with itself count, and agree:
    for equal weights the share of the pairs of different members is `num_members / (num_members - 1)` times this.
    Predictions are logits `(members, *batch, classes)`, the result is `(*batch,)`.

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])  # three members, one row
    ee.reduce.Disagreement()(logits)  # 4/9
    ```
    """

    event_ndim = 1

    def checked(self, predictions: PyTree) -> PyTree:
        """Logits as they are computed with."""
        name = "reduce.Disagreement"
        return _check.check_logits(name, _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The shares of votes of members."""
        return combine.vote(predictions, weights=weights)

    def of_groups(self, summaries: PyTree, weights: Any) -> Float[Array, "*batch classes"]:
        """The shares of all groups."""
        return combine.mean(summaries, weights=weights)

    def result(self, summary: PyTree) -> Float[Array, "*batch"]:
        """The probability of different votes."""
        return _weighting.different_votes(summary)


class _Parts(NamedTuple):
    mixture: Float[Array, "..."]
    aleatoric: Float[Array, "..."]
    epistemic: Float[Array, "..."]


class DecomposeEntropy(AbstractSummary):
    r"""The entropy of the mixture in two parts, in nats, as [`eqx_ensemble.uncertainty.decompose_entropy`][].

    `total` is the predictive entropy, `aleatoric` the expected one, `epistemic` the mutual information of label and
    member. That of all members is the mean of those within groups plus the one between the groups' mixtures $q_g$,
    $\sum_g w_g I_g + \sum_g w_g \mathrm{KL}(q_g \| q)$: no term is negative, so that small values keep their digits.
    Predictions are logits `(members, *batch, classes)`; the result is an
    [`eqx_ensemble.uncertainty.Decomposition`][] of `(*batch,)`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 5, 8, 1, key=key), 4, key=key)
    parts = ee.predict(ensemble, jnp.ones((100, 3)), combine=ee.reduce.DecomposeEntropy())
    parts.epistemic.shape  # (100,)
    ```
    """

    event_ndim = 1

    def checked(self, predictions: PyTree) -> PyTree:
        """Logits as they are computed with."""
        name = "reduce.DecomposeEntropy"
        return _check.check_logits(name, _check.one_array(predictions, name=name))

    def of_members(self, predictions: PyTree, weights: Any) -> _Parts:
        """The mixture of members and the two parts of its entropy."""
        parts = uncertainty.decompose_entropy(predictions, weights=weights)
        return _Parts(combine.mixture(predictions, weights=weights), parts.aleatoric, parts.epistemic)

    def of_groups(self, summaries: PyTree, weights: Any) -> _Parts:
        """The same of groups."""
        between = uncertainty.decompose_entropy(summaries.mixture, weights=weights).epistemic
        within = combine.mean(summaries.epistemic, weights=weights)
        aleatoric = combine.mean(summaries.aleatoric, weights=weights)
        return _Parts(combine.mixture(summaries.mixture, weights=weights), aleatoric, within + between)

    def result(self, summary: PyTree) -> Decomposition:
        """The two parts and their sum."""
        return Decomposition(summary.aleatoric + summary.epistemic, summary.aleatoric, summary.epistemic)
