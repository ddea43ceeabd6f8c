from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from ... import _keys, tree
from ..._axes import Each
from ..._check import check_flag, check_positive_int
from ..._compiled import filter_jit
from ..._ensemble import Ensemble
from ..._ensemble._check_members import check_index_of_members
from ..._predict import predict
from ..._pytree import PyTree
from ...plan._map import map_members
from .._check import check_options
from ..path._check import check_factor_ids
from ._check import check_link, check_per_member, check_sampling
from ._check_posterior import check_optimum
from ._evidence import best_prior, log_evidence
from ._links import Link
from ._member import LaplaceMember, Outputs, Predict, PredictOutputs
from ._sample import draw

M = TypeVar("M")


class Laplace(eqx.Module, Generic[M]):
    r"""Gaussian posteriors over the weights of all members, the result of [`eqx_ensemble.methods.laplace.fit`][].

    Each member has its own posterior, centred at its weights. Together they are a mixture of Gaussians with equal
    weights. `posterior[[0, 2]]` selects members and keeps their ids.

    **Attributes:**

    - `members`: an ensemble of the members with their posteriors.
    - `state`: the stacked `equinox.nn.State` of stateful members, else `None`.
    """

    members: Ensemble[LaplaceMember[M]]
    state: eqx.nn.State | None

    def __getitem__(self, index: Any) -> "Laplace[M]":
        """Selects members by an integer, a slice, a list of integers or a mask."""
        check_index_of_members(index)
        if isinstance(index, int | np.integer):
            index = [index]
        elif isinstance(index, jax.Array | np.ndarray) and index.ndim == 0:
            index = index.reshape(1)
        state = None if self.state is None else tree.take(self.state, index)
        return Laplace(self.members[index], state)

    @property
    def ensemble(self) -> Ensemble[M]:
        """The ensemble of the members' trained weights, the means of the posteriors."""
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

        A draw is a member whose selected weights are replaced. Draw $i$ does not depend on `num_samples`. Draws use the
        model itself, whereas [`eqx_ensemble.methods.laplace.Laplace.predict`][] uses its linearisation: for a last
        layer both agree; for inner layers predictions of draws are known to be worse.

        **Arguments:**

        - `num_samples`: the number of draws from each member.
        - `key`: the root key. The random stream of a member is derived from its id.

        **Returns:** the ensemble of all draws, those of one member adjacent, with the ids `id * num_samples + i`. Draws
        of stateful members use the state of their member:
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
        r"""Posterior predictions of all members, with the models linearised in the weights.

        The outputs of a member for a row are Gaussian, with mean $f(x)$ and covariance $S = J P^{-1} J^\top$. For
        regression the prediction is a mean and a variance, including that of the noise. For classes the mean
        probabilities have no closed form; `link` chooses an approximation:

        - `"probit"`, the default: $p_c \propto 1 / \sum_j \exp(-d_{cj})$ with the differences of logits
            $d_{cj} = (f_c - f_j) / \sqrt{1 + \pi \operatorname{Var}(f_c - f_j) / 8}$. For two classes its error is
            below 0.02. For random covariances with variances up to about 100 it was 0.05 on average and 0.25 at
            most for three classes, 0.06 and 0.18 for ten.
        - `"mc"`: Monte Carlo with `num_samples` draws per row, exact up to sampling error.
        - `"bridge"`: the mean of a Dirichlet (Laplace bridge). It does not depend on the scale of $S$, so predictions
            far from the data are as confident as others; `"bridge_norm"` first rescales both $f$ and $S$, as
            laplace-torch does. Not for `likelihood="binary"`.

        **Arguments:**

        - `x`: any PyTree of arrays `(rows, ...)`, as for [`eqx_ensemble.predict`][].
        - `link`: for classes, as above.
        - `num_samples`: the number of draws for `link="mc"`, 100 by default.
        - `combine`: combines the predictions of all members, such as [`eqx_ensemble.combine.mixture`][] for classes and
            [`eqx_ensemble.combine.gaussian`][] for regression, mixtures with equal weights.
        - `key`: the root key for `link="mc"`.
        - `options`: other options of [`eqx_ensemble.predict`][], such as `batch_size`, `memory`, `plan`, `mesh` and
            `weights`.

        **Returns:** for classes, log-probabilities `(members, rows, classes)`, also for two classes, which all
        functions of logits accept; for regression, [`eqx_ensemble.combine.Gaussian`][] with parts
        `(members, rows, ...)`. With `combine`, its result.

        **Raises:** `TypeError` or `ValueError` for options that the likelihood does not support; also as
        [`eqx_ensemble.predict`][].
        """
        name = "methods.laplace.Laplace.predict"
        check_options(options, ("fn", "state"), "the posterior has them", name=name)
        link = check_link(link, self.members.stacked.problem.likelihood, name=name)
        num_samples = check_sampling(link, num_samples, key, name=name)
        fn = Predict(link or "probit", num_samples)
        chance = {} if key is None else {"key": key, "inference": True}
        return predict(self.members, x, fn=fn, combine=combine, state=self.state, **chance, **options)

    def outputs(self, x: PyTree, **options: Any) -> Outputs:
        """The Gaussian distribution of each member's outputs for each row, from the linearised model.

        **Arguments:**

        - `x`: as for [`eqx_ensemble.predict`][].
        - `options`: other options of [`eqx_ensemble.predict`][], without `combine`.

        **Returns:** [`eqx_ensemble.methods.laplace.Outputs`][]: `mean` `(members, rows, out)` and `covariance`
        `(members, rows, out, out)`, with the outputs of a model flattened to one axis. Noise is not included.
        """
        check_options(options, ("fn", "state"), "the posterior has them", name="methods.laplace.Laplace.outputs")
        return predict(self.members, x, fn=PredictOutputs(), state=self.state, **options)

    def log_marginal_likelihood(self, prior_precision: Any = None, noise: Any = None) -> Float[Array, " members"]:
        r"""The log marginal likelihood (evidence) of each member, in nats.

        $$\log p(y \mid w) - \tfrac12 \big(\log\det P - \log\det P_0 + \delta \lVert w \rVert^2\big)$$

        with the prior precision $P_0 = \delta I$ of the selected weights $w$. It is exact for a linear model with
        Gaussian noise at its posterior mean, and differentiable with respect to both arguments. Weights that are not
        selected are fixed, so only posteriors over the same selection are comparable.

        **Arguments:**

        - `prior_precision`, `noise`: one number or `(members,)` each; by default the values of the fit.

        **Returns:** `(members,)`.

        **Raises:** `TypeError` or `ValueError` for values that are not above zero, and for `noise` with classes.
        """
        name = "methods.laplace.Laplace.log_marginal_likelihood"
        own = check_per_member(name, "prior_precision", prior_precision, self.prior_precision)
        noises = check_per_member(name, "noise", noise, self.noise)
        return _log_evidence(self.members, own, noises)

    def optimise_prior(self, *, fit_noise: bool = False) -> "Laplace[M]":
        r"""Maximises the marginal likelihood of each member over its prior precision.

        The maximum is MacKay's fixed point $\delta = \gamma / \lVert w \rVert^2$ with
        $\gamma = \sum_i l_i / (l_i + \delta)$ and the eigenvalues $l_i$ of $P - \delta I$; it is unique, and is found
        by bisection. With `fit_noise`, the noise is optimised too: $s^2 = \lVert y - f \rVert^2 / (N - \gamma)$.

        The weights do not change: they were trained with another prior, and are not a mode under the new one. If the
        two priors differ much, retrain.

        **Arguments:**

        - `fit_noise`: whether to optimise the standard deviation of the noise too.

        **Returns:** a new [`eqx_ensemble.methods.laplace.Laplace`][].

        **Raises:** `TypeError` for `fit_noise` with classes; `ValueError` if the marginal likelihood has no maximum,
        because the weights are zero or the outputs do not depend on them.
        """
        name = "methods.laplace.Laplace.optimise_prior"
        with_noise = check_flag(fit_noise, "fit_noise", name=name)
        if with_noise:
            check_per_member(name, "fit_noise", None if self.noise is not None else 1.0, self.noise)
        precision, noise = _best_prior(self.members, with_noise)
        check_optimum(precision, noise, self.members.ids, name=name)
        return with_values(self, precision, noise)


def with_values(posterior: Laplace[M], prior_precision: Array, noise: Array | None) -> Laplace[M]:
    """Replaces the prior precision and the noise of posteriors."""
    get = lambda members: (members.stacked.posterior.prior_precision, members.stacked.posterior.noise)
    members = eqx.tree_at(get, posterior.members, (prior_precision, noise), is_leaf=lambda x: x is None)
    return Laplace(members, posterior.state)


@filter_jit
def _log_evidence(members: Ensemble, prior_precision: Array, noise: Array | None) -> Float[Array, " members"]:
    return map_members(log_evidence)(members, Each(prior_precision), None if noise is None else Each(noise))


@filter_jit
def _best_prior(members: Ensemble, with_noise: bool) -> tuple[Array, Array | None]:  # noqa: FBT001
    return map_members(lambda member: best_prior(member, with_noise=with_noise))(members)
