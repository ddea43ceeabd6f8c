import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._axes import Each
from ..._compiled import filter_jit
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...plan import AbstractPlan
from ...plan._map import map_members
from ._choose import Chosen
from ._curvatures import CURVATURES
from ._data import Data
from ._likelihoods import LIKELIHOODS
from ._member import Posterior, Problem, call
from ._selection import AbstractSelection, Factors, Layer, Leaves


class Setup(eqx.Module):
    """The computation for one member, with its static settings."""

    structure: str = eqx.field(static=True)
    chosen: Chosen = eqx.field(static=True)
    problem: Problem

    def selection(self, indices: Array | None) -> AbstractSelection:
        """The selected weights of one member."""
        if self.structure == "kron":
            return Layer(self.chosen.positions[0])
        return Leaves(self.chosen.positions, indices)

    def start(self, num_members: int, indices: Any) -> PyTree:
        """The initial sums of all members."""
        zero = jnp.zeros((), self.chosen.dtype)
        count = self.chosen.num_weights if indices is None else jax.tree.leaves(indices)[0].shape[-1]
        sums = CURVATURES[self.structure].start(count, self.chosen.shape, self.chosen.dtype), zero, zero
        return jax.tree.map(lambda x: jnp.zeros((num_members, *x.shape), x.dtype), sums)

    def add(self, model: PyTree, sums: PyTree, data: Data, indices: Array | None, state: eqx.nn.State | None) -> PyTree:
        """Adds a batch of rows to the sums of one member."""
        model, likelihood = eqx.nn.inference_mode(model), LIKELIHOODS[self.problem.likelihood]
        selection = self.selection(indices)

        def row(x: PyTree, y: Array, counts: Array) -> tuple[Array, PyTree]:
            outputs, jacobian = self.problem.outputs(selection, model, x, state)
            if isinstance(jacobian, Factors):
                roots = jacobian._replace(outputs=likelihood.root(outputs, jacobian.outputs))
            else:
                roots = likelihood.root(outputs, jacobian)
            # Rows of weight zero may contain NaN.
            return jax.tree.map(lambda x: jnp.where(counts, x, 0), (likelihood.loss(outputs, y), roots))

        weights = data.weights.astype(self.chosen.dtype)
        losses, roots = jax.vmap(row)(data.x, data.y, weights > 0)
        curvature, loss, count = sums
        targets = self.problem.shape if likelihood.has_noise else ()
        number = jnp.sum(weights) * math.prod(targets)
        added = CURVATURES[self.structure].add(curvature, roots, weights)
        return added, loss + weights @ losses.astype(weights.dtype), count + number

    def finish(
        self, sums: PyTree, indices: Array | None, prior_precision: Float[Array, ""], noise: Float[Array, ""] | None
    ) -> Posterior:
        """The posterior of one member. By default, the noise is that of its residuals."""
        curvature, loss, count = sums
        if noise is None and LIKELIHOODS[self.problem.likelihood].has_noise:
            noise = jnp.sqrt(loss / count)
        found = CURVATURES[self.structure].finish(curvature)
        return Posterior(self.selection(indices), found, prior_precision, noise, loss, count)


@filter_jit
def add_batch(
    setup: Setup, plan: AbstractPlan, ensemble: Ensemble, sums: Each, data: Data, indices: Any, state: Any
) -> PyTree:
    """Adds a batch of rows to the sums of all members."""
    fn = lambda model, sums, data, indices, state: setup.add(model, sums, data, indices, state)
    return map_members(fn, plan=plan)(ensemble, sums, data, indices, state)


@filter_jit
def finish(setup: Setup, plan: AbstractPlan, sums: Each, indices: Any, prior_precision: Each, noise: Any) -> Posterior:
    """The posteriors of all members."""
    return map_members(setup.finish, plan=plan)(sums, indices, prior_precision, noise)


@filter_jit
def factor_error(setup: Setup, ensemble: Ensemble, row: Data, state: Any) -> Array:
    """The relative error of each member's factors: of their outer product, compared with the Jacobian of a layer."""
    layer = setup.selection(None)

    def of_member(model: PyTree, row: Data, state: Any) -> Array:
        model = eqx.nn.inference_mode(model)
        x = jax.tree.map(lambda x: x[0], row.x)
        shared = jax.tree.map(lambda leaf: leaf, state)
        vector = layer.vector(model)
        _, factors = setup.problem.outputs(layer, model, x, state)
        mix = jnp.cos(jnp.arange(factors.outputs.shape[0], dtype=vector.dtype))
        outputs = lambda vector: call(setup.problem.fn, layer.insert(model, vector), x, shared).ravel() @ mix
        exact = jax.grad(lambda vector: outputs(vector).astype(vector.dtype))(vector)
        found = jnp.outer(mix @ factors.outputs, factors.inputs).ravel()
        return jnp.max(jnp.abs(found - exact)) / jnp.maximum(jnp.max(jnp.abs(exact)), jnp.finfo(vector.dtype).tiny)

    return map_members(of_member)(ensemble, row, state)
