import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._pytree import PyTree
from ...combine import Gaussian
from ._curvature import AbstractCurvature
from ._likelihoods import LIKELIHOODS
from ._links import Link, both_classes, log_probabilities
from ._selection import AbstractSelection

M = TypeVar("M")


class Outputs(NamedTuple):
    """The result of [`eqx_ensemble.methods.laplace.Laplace.outputs`][], for each member and row.

    **Attributes:**

    - `mean`: `(members, rows, out)`, the outputs of the model: logits, or means.
    - `covariance`: `(members, rows, out, out)`, the covariance under the linearised model, without noise.
    """

    mean: Float[Array, "*batch out"]
    covariance: Float[Array, "*batch out out"]


def call(fn: Callable[..., Any] | None, model: Any, x: PyTree, state: eqx.nn.State | None) -> Any:
    """The outputs of a model for one row, not flattened."""
    given = (x,) if state is None else (x, state)
    out = model(*given) if fn is None else fn(model, *given)
    return out if state is None else out[0]


class Problem(eqx.Module):
    """The static settings of all members: the likelihood, the call of a model, and the shape of its outputs."""

    likelihood: str = eqx.field(static=True)
    fn: Callable[..., Any] | None = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def outputs(
        self, selection: AbstractSelection, model: PyTree, x: PyTree, state: eqx.nn.State | None
    ) -> tuple[Float[Array, " out"], Any]:
        """The flattened outputs for one row, and their Jacobian."""
        return selection.linearise(lambda model: call(self.fn, model, x, state).ravel(), model, math.prod(self.shape))


class Posterior(eqx.Module):
    """The Gaussian posterior over one member's selected weights, centred at those of its model.

    `loss` and `count` are sums over the rows: of negative log-likelihoods, or of squared errors for likelihoods with
    noise; and of the number of targets.
    """

    selection: AbstractSelection
    curvature: AbstractCurvature
    prior_precision: Float[Array, ""]
    noise: Float[Array, ""] | None
    loss: Float[Array, ""]
    count: Float[Array, ""]

    @property
    def precision(self) -> Float[Array, " weights"]:
        """The eigenvalues of the posterior's precision."""
        values = self.curvature.values
        return self.prior_precision + (values if self.noise is None else values / self.noise**2)


class LaplaceMember(eqx.Module, Generic[M]):
    """A model and the posterior of its weights: one member of [`eqx_ensemble.methods.laplace.Laplace`][]."""

    model: M
    posterior: Posterior
    problem: Problem

    def outputs(self, x: PyTree, state: eqx.nn.State | None = None) -> Outputs:
        """Mean and covariance of the outputs for one row."""
        mean, jacobian = self.problem.outputs(self.posterior.selection, self.model, x, state)
        return Outputs(mean, self.posterior.curvature.covariance(jacobian, self.posterior.precision))


@dataclasses.dataclass(frozen=True)
class PredictOutputs:
    """Calls a member for the distribution of its outputs."""

    def __call__(self, member: LaplaceMember, x: PyTree, state: Any = None) -> Outputs:
        return member.outputs(x, state)


@dataclasses.dataclass(frozen=True)
class Predict:
    """Calls a member for its prediction."""

    link: Link
    num_samples: int

    def __call__(
        self, member: LaplaceMember, x: PyTree, state: Any = None, *, key: Key[Array, ""] | None = None
    ) -> Any:
        outputs = member.outputs(x, state)
        problem, noise = member.problem, member.posterior.noise
        if LIKELIHOODS[problem.likelihood].has_noise:
            assert noise is not None
            variance = jnp.diagonal(outputs.covariance) + noise**2
            return Gaussian(outputs.mean.reshape(problem.shape), variance.reshape(problem.shape))
        if problem.likelihood == "binary":
            outputs = Outputs(*both_classes(*outputs))
        return log_probabilities(*outputs, link=self.link, num_samples=self.num_samples, key=key)
