import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._pytree import PyTree
from ...combine import Gaussian
from ._selection import AbstractCurvature, AbstractSelection

Link = Literal["probit", "bridge", "bridge_norm", "mc"]
LINKS = ("probit", "bridge", "bridge_norm", "mc")


def probit(mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"]) -> Float[Array, " classes"]:
    """Log-probabilities from differences of logits, divided by `sqrt(1 + pi / 8 * variance)` of the difference."""
    variances = jnp.diagonal(covariance)
    # Of a difference: what all logits share cancels. Rounding may leave it negative.
    spread = jnp.maximum(variances[:, None] + variances[None] - 2 * covariance, 0)
    differences = (mean[:, None] - mean[None]) / jnp.sqrt(1 + math.pi / 8 * spread)
    return jax.nn.log_softmax(-jax.nn.logsumexp(-differences, axis=1))


def bridge(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], *, normalise: bool
) -> Float[Array, " classes"]:
    """Log-probabilities of the mean of the Dirichlet distribution given by the Laplace bridge.

    Logits are first conditioned on a sum of zero. Computed in log space, because the concentration of a large logit
    overflows.
    """
    classes = mean.shape[0]
    across = jnp.sum(covariance, axis=1)
    total = jnp.sum(across)
    share = across / jnp.where(total > 0, total, 1)
    mean = mean - share * jnp.sum(mean)
    variance = jnp.diagonal(covariance) - share * across
    # The difference may round to zero, and a zero variance would make a class certain.
    variance = jnp.maximum(variance, jnp.finfo(mean.dtype).eps * jnp.diagonal(covariance))
    if normalise:
        scale = jnp.mean(variance) / math.sqrt(classes / 2)
        mean, variance = mean / jnp.sqrt(scale), variance / scale
    odds = mean + jax.nn.logsumexp(-mean) - 2 * math.log(classes)
    log_base = math.log1p(-2 / classes) if classes > 2 else -math.inf
    return jax.nn.log_softmax(jnp.logaddexp(jnp.full_like(odds, log_base), odds) - jnp.log(variance))


def monte_carlo(
    mean: Float[Array, " classes"], covariance: Float[Array, "classes classes"], num_samples: int, key: Key[Array, ""]
) -> Float[Array, " classes"]:
    """The logarithm of the mean probabilities over draws of the logits."""
    values, vectors = jnp.linalg.eigh(covariance)  # the covariance may be singular
    root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None]
    noise = jax.random.normal(key, (num_samples, mean.shape[0]), mean.dtype)
    logs = jax.nn.log_softmax(mean[None] + noise @ root.T)
    return jax.nn.logsumexp(logs, axis=0) - math.log(num_samples)


def log_probabilities(
    mean: Float[Array, " classes"],
    covariance: Float[Array, "classes classes"],
    *,
    link: Link,
    num_samples: int,
    key: Key[Array, ""] | None,
) -> Float[Array, " classes"]:
    """The log-probabilities of the classes with the given link."""
    if link == "probit":
        return probit(mean, covariance)
    if link == "mc":
        assert key is not None
        return monte_carlo(mean, covariance, num_samples, key)
    return bridge(mean, covariance, normalise=link == "bridge_norm")


def both_classes(
    mean: Float[Array, " 1"], covariance: Float[Array, "1 1"]
) -> tuple[Float[Array, " 2"], Float[Array, "2 2"]]:
    """The logits of classes 0 and 1 from one logit, and their covariance."""
    return jnp.concatenate([jnp.zeros_like(mean), mean]), jnp.pad(covariance, ((1, 0), (1, 0)))


class AbstractLikelihood(eqx.Module):
    """The loss and curvature of a likelihood, for one row of outputs `(out,)`.

    A likelihood with noise is evaluated at standard deviation 1, so that the noise can be changed afterwards.
    """

    has_noise: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The negative log-likelihood; with noise, the sum of squared errors."""

    @abc.abstractmethod
    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """`L' jacobian`, where `L L'` is the Hessian of the negative log-likelihood with respect to the outputs."""


class Regression(AbstractLikelihood):
    """Gaussian noise with one standard deviation for all outputs."""

    has_noise: ClassVar[bool] = True

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The sum of squared errors."""
        return jnp.sum((outputs - target.astype(outputs.dtype)) ** 2)

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The Jacobian itself."""
        return jacobian


class Binary(AbstractLikelihood):
    """Labels 0 and 1, or probabilities of 1; one output, the logit of 1. Other labels make the loss NaN."""

    has_noise: ClassVar[bool] = False

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The cross-entropy in nats."""
        share = jnp.where((target >= 0) & (target <= 1), target.astype(outputs.dtype), jnp.nan)
        each = share * jax.nn.log_sigmoid(outputs) + (1 - share) * jax.nn.log_sigmoid(-outputs)
        return -jnp.sum(each)

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The second derivative is `p (1 - p)`, computed in log space for accuracy."""
        log = jax.nn.log_sigmoid(outputs) + jax.nn.log_sigmoid(-outputs)
        return jnp.exp(log / 2)[:, None] * jacobian


class Classification(AbstractLikelihood):
    """Labels from 0 to classes - 1; one output per class, the logits. Other labels make the loss NaN."""

    has_noise: ClassVar[bool] = False

    def loss(self, outputs: Float[Array, " out"], target: Array) -> Float[Array, ""]:
        """The cross-entropy in nats."""
        is_class = (target >= 0) & (target < outputs.shape[0])
        return jnp.where(is_class, -jax.nn.log_softmax(outputs)[target], jnp.nan)

    def root(self, outputs: Float[Array, " out"], jacobian: Float[Array, "out n"]) -> Float[Array, "out n"]:
        """The second derivative `diag(p) - p p'` has the root `(diag(p) - p p') / sqrt(p)`, column by column."""
        logs = jax.nn.log_softmax(outputs)
        mean = jnp.exp(logs) @ jacobian
        return jnp.exp(logs / 2)[:, None] * (jacobian - mean[None])


LIKELIHOODS: dict[str, AbstractLikelihood] = {
    "regression": Regression(),
    "binary": Binary(),
    "classification": Classification(),
}


def log_likelihood(kind: str, loss: Any, count: Any, noise: Any) -> Float[Array, ""]:
    """The log-likelihood of all rows in nats, from the sum of their losses and the number of targets."""
    if not LIKELIHOODS[kind].has_noise:
        return -loss
    return -loss / (2 * noise**2) - count * (jnp.log(noise) + math.log(2 * math.pi) / 2)


M = TypeVar("M")


class Outputs(NamedTuple):
    """The result of [`eqx_ensemble.methods.laplace.Laplace.outputs`][], for each member and row.

    **Attributes:**

    - `mean`: `(members, rows, out)`, the outputs of the model, flattened to one axis.
    - `covariance`: `(members, rows, out, out)`.
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
