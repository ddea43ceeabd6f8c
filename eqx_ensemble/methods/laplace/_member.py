import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..._pytree import PyTree
from ...combine import Gaussian
from ._likelihood import Link, both_classes, monte_carlo, probit

M = TypeVar("M")


class Outputs(NamedTuple):
    """The result of [`eqx_ensemble.methods.laplace.Laplace.outputs`][], for each member and row.

    **Attributes:**

    - `mean`: `(members, rows, out)`, the outputs of the model, flattened to one axis.
    - `covariance`: `(members, rows, out, out)`.
    """

    mean: Float[Array, "*batch out"]
    covariance: Float[Array, "*batch out out"]


class Problem(eqx.Module):
    """What is static and the same for all members.

    `positions` are those of the selected leaves among all leaves of a model, `shape` is that of its outputs for a row.
    """

    likelihood: str = eqx.field(static=True)
    structure: str = eqx.field(static=True)
    positions: tuple[int, ...] = eqx.field(static=True)
    fn: Callable[..., Any] | None = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def weights(self, model: M) -> tuple[Float[Array, " weights"], Callable[[Float[Array, " weights"]], M]]:
        """The selected weights as a vector, at least float32, and the function that puts others into the model."""
        leaves, treedef = jax.tree.flatten(model)
        own = {i: jnp.asarray(leaves[i]) for i in self.positions}
        dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in own.values()) else jnp.float32
        vector, unravel = jax.flatten_util.ravel_pytree({i: x.astype(dtype) for i, x in own.items()})

        def insert(vector: Float[Array, " weights"]) -> M:
            new = {i: x.astype(own[i].dtype) for i, x in unravel(vector).items()}
            return jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

        return vector, insert

    def linearise(
        self, model: PyTree, x: PyTree, state: eqx.nn.State | None
    ) -> tuple[Float[Array, " out"], Float[Array, "out weights"]]:
        """The flattened outputs for one row, and their Jacobian with respect to the selected weights."""
        vector, insert = self.weights(model)
        outputs = lambda vector: call(self.fn, insert(vector), x, state).ravel().astype(vector.dtype)
        found, pull = jax.vjp(outputs, vector)
        return found, jax.vmap(pull)(jnp.eye(found.size, dtype=vector.dtype))[0]


def call(fn: Callable[..., Any] | None, model: Any, x: PyTree, state: eqx.nn.State | None) -> Any:
    """The outputs of a model for one row, not flattened."""
    given = (x,) if state is None else (x, state)
    out = model(*given) if fn is None else fn(model, *given)
    return out if state is None else out[0]


class Posterior(eqx.Module):
    """The Gaussian posterior over one member's selected weights, centred at those of its model.

    `values` are the eigenvalues of the generalised Gauss-Newton matrix, without noise, and the columns of `vectors` its
    eigenvectors, `None` for unit vectors. `loss` and `count` are sums over the rows: of the losses of the likelihood,
    and of the number of targets.
    """

    values: Float[Array, " weights"]
    vectors: Float[Array, "weights weights"] | None
    prior_precision: Float[Array, ""]
    noise: Float[Array, ""] | None
    loss: Float[Array, ""]
    count: Float[Array, ""]

    @property
    def precision(self) -> Float[Array, " weights"]:
        """The eigenvalues of the posterior's precision."""
        return self.prior_precision + (self.values if self.noise is None else self.values / self.noise**2)


class LaplaceMember(eqx.Module, Generic[M]):
    """A model and the posterior of its weights: one member of [`eqx_ensemble.methods.laplace.Laplace`][]."""

    model: M
    posterior: Posterior
    problem: Problem

    def outputs(self, x: PyTree, state: eqx.nn.State | None = None) -> Outputs:
        """Mean and covariance of the outputs for one row."""
        mean, jacobian = self.problem.linearise(self.model, x, state)
        vectors = self.posterior.vectors
        along = jacobian if vectors is None else jacobian @ vectors
        scaled = along / jnp.sqrt(self.posterior.precision)[None]
        return Outputs(mean, scaled @ scaled.T)

    def draw(self, key: Key[Array, ""], numbers: Int[Array, " draws"]) -> PyTree:
        """The arrays of models with weights drawn from the posterior, each `(draws, ...)`."""
        (vector, insert), precision = self.problem.weights(self.model), self.posterior.precision

        def one(number: Int[Array, ""]) -> PyTree:
            noise = jax.random.normal(jax.random.fold_in(key, number), precision.shape, precision.dtype)
            away, vectors = noise / jnp.sqrt(precision), self.posterior.vectors
            return eqx.filter(insert(vector + (away if vectors is None else vectors @ away)), eqx.is_array)

        return jax.vmap(one)(numbers)

    def log_evidence(self, prior_precision: Float[Array, ""], noise: Float[Array, ""] | None) -> Float[Array, ""]:
        """The log marginal likelihood of the data, in nats."""
        own, (vector, _) = self.posterior, self.problem.weights(self.model)
        values, fit = own.values, -own.loss
        if noise is not None:
            values = values / noise**2
            fit = fit / (2 * noise**2) - own.count * (jnp.log(noise) + math.log(2 * math.pi) / 2)
        logdets = jnp.sum(jnp.log1p(values / prior_precision))  # of the posterior's precision minus that of the prior's
        return fit - (logdets + prior_precision * (vector @ vector)) / 2


@dataclasses.dataclass(frozen=True)
class Predict:
    """Calls a member for its prediction."""

    link: Link = "probit"
    num_samples: int = 0

    def __call__(self, member: LaplaceMember, x: PyTree, state: Any = None, *, key: Any = None) -> Any:
        outputs, problem, noise = member.outputs(x, state), member.problem, member.posterior.noise
        if noise is not None:
            variance = jnp.diagonal(outputs.covariance) + noise**2
            return Gaussian(outputs.mean.reshape(problem.shape), variance.reshape(problem.shape))
        logits = both_classes(*outputs) if problem.likelihood == "binary" else outputs
        return probit(*logits) if self.link == "probit" else monte_carlo(*logits, self.num_samples, key)
