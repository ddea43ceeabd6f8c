from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from ... import _keys, tree
from ..._axes import Each
from ..._check import check_flag, check_positive_int
from ..._ensemble import Ensemble
from ..._ensemble._check_members import check_index_of_members
from ..._predict import predict
from ..._pytree import PyTree
from ...plan._map import map_members
from ..path._check import check_factor_ids
from ._check import check_link, check_per_member, check_sampling
from ._check_posterior import check_optimum
from ._evidence import best_prior, log_evidence
from ._links import Link
from ._member import LaplaceMember, Outputs, Predict, PredictOutputs
from ._sample import draw

M = TypeVar("M")


class Laplace(eqx.Module, Generic[M]):
    r"""Gaussian posteriors of the weights of all members; [`eqx_ensemble.methods.laplace.fit`][] makes it.

    Each member has its own posterior, around its own weights. Together they are a mixture of Gaussians with equal
    weights. `posterior[[0, 2]]` is that of some members, with their ids.

    **Attributes:**

    - `members`: the members with their posteriors, an ensemble.
    - `state`: the stacked `equinox.nn.State` of stateful members, else `None`.
    """

    members: Ensemble[LaplaceMember[M]]
    state: eqx.nn.State | None

    def __getitem__(self, index: Any) -> "Laplace[M]":
        """The posterior of some members: an integer, a slice, a list of integers or a mask."""
        check_index_of_members(index)
        if isinstance(index, int | np.integer):
            index = [index]
        elif isinstance(index, jax.Array | np.ndarray) and index.ndim == 0:
            index = index.reshape(1)
        state = None if self.state is None else tree.take(self.state, index)
        return Laplace(self.members[index], state)

    @property
    def ensemble(self) -> Ensemble[M]:
        """The ensemble that the posteriors are around."""
        return Ensemble(self.members.stacked.model, self.members.shared.model, self.members.ids)

    @property
    def prior_precision(self) -> Float[Array, " members"]:
        """The precision of each member's prior."""
        return self.members.stacked.posterior.prior_precision

    @property
    def noise(self) -> Float[Array, " members"] | None:
        """The standard deviation of the noise of each member; `None` for classes."""
        return self.members.stacked.posterior.noise

    def sample(self, num_samples: int, *, key: Any) -> Ensemble[M]:
        """Draws members from the posteriors.

        A draw is a member whose selected weights are replaced. Draws do not change with `num_samples`. They call the
        model itself, where [`eqx_ensemble.methods.laplace.Laplace.predict`][] calls its linearisation: for a last
        layer both are the same, for inner layers predictions of draws are known to fit worse.

        **Arguments:**

        - `num_samples`: the number of draws from each member.
        - `key`: the root key. The stream of a member follows from its id.

        **Returns:** the ensemble of all draws, those of one member one after another, with the ids
        `id * num_samples + i`. Stateful draws have the state of their member:
        `ee.tree.take(posterior.state, np.repeat(np.arange(num_members), num_samples))`.

        **Raises:** `TypeError` or `ValueError` for invalid arguments.
        """
        name = "methods.laplace.Laplace.sample"
        num_samples = check_positive_int(num_samples, "num_samples", name=name)
        key = _keys.root(key, name=name)
        check_factor_ids(self.members.ids, num_samples, name=name)
        return draw(self.members, self.ensemble, num_samples, key)

    def predict(
        self,
        x: PyTree,
        *,
        link: Link | None = None,
        num_samples: int | None = None,
        combine: Callable[..., Any] | None = None,
        key: Any = None,
        **options: Any,
    ) -> PyTree:
        r"""Predictions of all members, averaged over their posteriors, with the models linearised in the weights.

        The outputs of a member for a row are Gaussian, with the mean $f(x)$ and the covariance $S = J P^{-1} J^\top$.
        For regression the prediction is a mean and a variance, that of the noise included. For classes the
        average of the probabilities has no closed form; `link` chooses an approximation:

        - `"probit"`, the default: $f / \sqrt{1 + \pi \operatorname{diag}(S) / 8}$ are logits. For two classes its
            error is below 0.02. For more it ignores correlations: variance that is common to all logits, which changes
            no probability, makes the prediction less certain.
        - `"mc"`: draws from the Gaussian, `num_samples` for each row. Exact up to their error.
        - `"bridge"`: the mean of a Dirichlet (Laplace bridge). It does not depend on the scale of $S$ at all, so that
            rows far from the data are as certain as others; `"bridge_norm"` rescales both $f$ and $S$ first, as
            laplace-torch does. Not for `likelihood="binary"`.

        **Arguments:**

        - `x`: any PyTree of arrays `(rows, ...)`, as for [`eqx_ensemble.predict`][].
        - `link`: for classes, as above.
        - `num_samples`: the number of draws of `link="mc"`, 100 by default.
        - `combine`: combines the predictions of all members, such as [`eqx_ensemble.combine.mixture`][] for classes
            and [`eqx_ensemble.combine.gaussian`][] for regression: the mixture, with equal weights.
        - `key`: the root key of `link="mc"`.
        - `options`: others of [`eqx_ensemble.predict`][], such as `batch_size`, `memory`, `plan`, `mesh` and `weights`.

        **Returns:** for classes the log-probabilities `(members, rows, classes)`, also for two, which all functions of
        logits take; for regression [`eqx_ensemble.combine.Gaussian`][], of which each part is
        `(members, rows, ...)`. With `combine`, its result.

        **Raises:** `TypeError` or `ValueError` for options that do not fit the likelihood.
        """
        name = "methods.laplace.Laplace.predict"
        link = check_link(link, self.members.stacked.problem.likelihood, name=name)
        num_samples = check_sampling(link, num_samples, key, name=name)
        fn = Predict(link or "probit", num_samples)
        chance = {} if key is None else {"key": key, "inference": True}
        return predict(self.members, x, fn=fn, combine=combine, state=self.state, **chance, **options)

    def outputs(self, x: PyTree, **options: Any) -> Outputs:
        """The Gaussian of each member's outputs for each row: means, and covariances of the linearised model.

        **Arguments:**

        - `x`: as for [`eqx_ensemble.predict`][].
        - `options`: others of [`eqx_ensemble.predict`][], without `combine`.

        **Returns:** a named tuple: `mean` `(members, rows, out)` and `covariance` `(members, rows, out, out)`, with the
        outputs of a model on one axis. Noise is not included.
        """
        return predict(self.members, x, fn=PredictOutputs(), state=self.state, **options)

    def log_marginal_likelihood(self, prior_precision: Any = None, noise: Any = None) -> Float[Array, " members"]:
        r"""The logarithm of each member's evidence, in nats.

        $$\log p(y \mid w) - \tfrac12 \big(\log\det P - \log\det P_0 + \delta \lVert w \rVert^2\big)$$

        with the prior precision $P_0 = \delta I$ of the selected weights $w$. Exact for a linear model with
        Gaussian noise at its posterior mean. It is differentiable in both arguments. Weights that are not selected
        count as known, so that only posteriors of the same selection compare.

        **Arguments:**

        - `prior_precision`, `noise`: other values than those of the fit, each a number or `(members,)`.

        **Returns:** `(members,)`.

        **Raises:** `TypeError` or `ValueError` for values that are not above zero, and for `noise` of classes.
        """
        name = "methods.laplace.Laplace.log_marginal_likelihood"
        own = check_per_member(name, "prior_precision", prior_precision, self.prior_precision)
        noises = check_per_member(name, "noise", noise, self.noise)
        return _log_evidence(self.members, own, noises)

    def optimise_prior(self, *, fit_noise: bool = False) -> "Laplace[M]":
        r"""The same with the prior precision of the largest marginal likelihood, for each member.

        It is MacKay's fixed point $\delta = \gamma / \lVert w \rVert^2$ with $\gamma = \sum_i l_i / (l_i + \delta)$,
        which is unique, and is found by bisection. With `fit_noise` the noise is maximised too:
        $s^2 = \lVert y - f \rVert^2 / (N - \gamma)$.

        The weights stay as they are: they were trained with another prior, and are no mode under the new one. Where
        the two priors differ much, train again.

        **Arguments:**

        - `fit_noise`: also for the standard deviation of the noise.

        **Returns:** [`eqx_ensemble.methods.laplace.Laplace`][].

        **Raises:** `TypeError` for `fit_noise` of classes; `ValueError` where the marginal likelihood has no maximum:
        the weights are zero, or the data say nothing about them.
        """
        name = "methods.laplace.Laplace.optimise_prior"
        with_noise = check_flag(fit_noise, "fit_noise", name=name)
        if with_noise:
            check_per_member(name, "fit_noise", None if self.noise is not None else 1.0, self.noise)
        precision, noise = _best_prior(self.members, with_noise)
        check_optimum(precision, noise, self.members.ids, name=name)
        return with_values(self, precision, noise)


def with_values(posterior: Laplace[M], prior_precision: Array, noise: Array | None) -> Laplace[M]:
    """The same posteriors with other values of the prior precision and the noise."""
    get = lambda members: (members.stacked.posterior.prior_precision, members.stacked.posterior.noise)
    members = eqx.tree_at(get, posterior.members, (prior_precision, noise), is_leaf=lambda x: x is None)
    return Laplace(members, posterior.state)


@eqx.filter_jit
def _log_evidence(members: Ensemble, prior_precision: Array, noise: Array | None) -> Float[Array, " members"]:
    return map_members(log_evidence)(members, Each(prior_precision), None if noise is None else Each(noise))


@eqx.filter_jit
def _best_prior(members: Ensemble, with_noise: bool) -> tuple[Array, Array | None]:  # noqa: FBT001
    return map_members(lambda member: best_prior(member, with_noise=with_noise))(members)
