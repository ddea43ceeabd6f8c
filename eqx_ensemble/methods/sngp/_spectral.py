import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from ..._caller import caller
from ..._check import check_flag, check_optional_function, check_positive_int
from ..._keys import own_key
from ..._pytree import PyTree
from ...train._optimiser import only_supported
from ._model import check_bound, check_matrices


class SpectralState(NamedTuple):
    """The state of an optimiser that bounds spectral norms: estimates of a left singular vector of each weight."""

    inner_state: PyTree
    vectors: tuple[Array, ...]


def bound_spectral_norm(
    optimiser: optax.GradientTransformation,
    bound: Any,
    *,
    where: Callable[[Any], Any] | None = None,
    num_iterations: int = 1,
    certified: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Bounds the spectral norms of weights: after each step, $W$ becomes $W / \max(1, \sigma(W) / c)$.

    $\sigma$ is estimated from below by power iteration, so norms may exceed the bound while weights change fast.
    Exclude layers stacked in one array for `jax.lax.scan` with `where`.

    **Arguments:**

    - `optimiser`: the whole optax optimiser.
    - `bound`: $c$, above zero; the authors use 0.95 for dense layers and 6 for convolutions. It may be a
        hyper-parameter.
    - `where`: selects the parts of a model whose arrays of two or more axes are bounded; by default its `network`.
    - `num_iterations`: power iterations per step.
    - `certified`: whether the bound applies to convolutions, not to kernels as matrices `(out, in * kernel)`.

    **Returns:** an optax optimiser.

    ```python
    optimiser = ee.methods.sngp.bound_spectral_norm(
        optax.adam(1e-3), 0.95, where=lambda model: model.layers[:-1]
    )
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2006.10108)
    """
    check_bound(bound)
    check_optional_function(where, "where", example="lambda model: model.network")
    check_positive_int(num_iterations, "num_iterations")
    check_flag(certified, "certified")
    inner = optax.with_extra_args_support(optimiser)
    select = where or (lambda model: model.network)

    def init(params: PyTree) -> SpectralState:
        weights = [x for _, x in _matrices(params, select)]
        return SpectralState(inner.init(params), tuple(_first_vector(x, i) for i, x in enumerate(weights)))

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, SpectralState]:
        if params is None:
            raise ValueError(f"`{caller()}` bounds weights: call `update(grads, state, params)` with the weights.")
        updates, inner_state = inner.update(updates, state.inner_state, params, **only_supported(inner.update, extra))
        changes, treedef = jax.tree.flatten(updates)
        vectors = []
        for (i, weight), u in zip(_matrices(params, select), state.vectors, strict=True):
            new = weight + jnp.asarray(changes[i], weight.dtype)
            norm, u = _norm(new, u, num_iterations)
            stretch = math.sqrt(math.prod(weight.shape[2:])) if certified else 1.0
            ratio = jnp.maximum(1, stretch * norm / jnp.asarray(bound, norm.dtype))
            bounded = (new / ratio.astype(new.dtype)) - weight
            changes[i] = jnp.where(ratio > 1, bounded.astype(changes[i].dtype), changes[i])
            vectors.append(u)
        return jax.tree.unflatten(treedef, changes), SpectralState(inner_state, tuple(vectors))

    return optax.GradientTransformationExtraArgs(init, update)


def _matrices(params: PyTree, select: Callable[[Any], Any]) -> list[tuple[int, Array]]:
    """The selected weights, with their positions among the leaves."""
    leaves, treedef = jax.tree.flatten(params)
    positions = check_matrices(select, jax.tree.unflatten(treedef, range(len(leaves))), leaves)
    return [(i, leaves[i]) for i in positions]


def _first_vector(weight: Array, number: int) -> Float[Array, " out"]:
    """An initial vector for the power iteration: 15 iterations from a random vector."""
    dtype = jnp.float32 if jnp.finfo(weight.dtype).bits < 32 else weight.dtype
    u = jax.random.normal(jax.random.fold_in(own_key(), number), weight.shape[:1], dtype)
    return _norm(weight, u, 15)[1]


def _norm(weight: Array, u: Float[Array, " out"], num_iterations: int) -> tuple[Float[Array, ""], Float[Array, " out"]]:
    """The largest singular value by power iteration, and its left singular vector."""
    matrix = weight.reshape(weight.shape[0], -1).astype(u.dtype)
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)
    for _ in range(num_iterations):
        new = matrix @ unit(matrix.T @ u)
        u = jnp.where(jnp.any(new != 0), unit(new), u)  # a zero vector, from zero weights, would remain zero
    return jnp.linalg.norm(matrix.T @ u), u
