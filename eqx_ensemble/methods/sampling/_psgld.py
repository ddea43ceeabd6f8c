from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from ..._pytree import PyTree
from ._check import check_adapt_steps, check_eps, check_fraction, check_weights
from ._noise import draw_noise, first_key, next_count, rates


class PSGLDState(NamedTuple):
    """The state of `psgld`: the number of steps, the key of the noise, and the mean squared gradients."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]
    squares: PyTree


def psgld(
    learning_rate: Any,
    num_rows: Any,
    *,
    decay: Any = 0.99,
    eps: Any = 1e-5,
    adapt_steps: Any = None,
    temperature: Any = 1.0,
    key: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Preconditioned SGLD: Langevin dynamics with the per-weight step sizes of RMSProp.

    In the notation of [`eqx_ensemble.methods.sampling.sgld`][], a step is

    $$s \leftarrow \lambda s + (1 - \lambda)\, g^2, \qquad G = \frac{1}{\varepsilon + \sqrt s}, \qquad
    w \leftarrow w - \eta\, G g + \sqrt{2 \eta T G / N}\; \xi$$

    Li et al. write $\epsilon / 2$ for $\eta / N$. As in their algorithm, the term $\Gamma$ with the derivative of $G$
    is omitted. While $G$ adapts to the weights, this is biased for any step size: for a quadratic loss, the variance of
    a chain that is slow compared with the window $1 / (1 - \lambda)$ tends to twice that of the posterior. With
    `adapt_steps`, $G$ is constant afterwards, and the chain is as exact as SGLD: start sampling after that.

    The first steps are large, because $s$ starts at 0: start from trained members, or warm up the learning rate.

    **Arguments:**

    - `learning_rate`, `num_rows`, `temperature`, `key`: as for [`eqx_ensemble.methods.sampling.sgld`][].
    - `decay`: $\lambda$, from 0 to below 1.
    - `eps`: $\varepsilon$, above 0; the step size of a weight is at most $1 / \varepsilon$ times the learning rate.
    - `adapt_steps`: the number of steps in which $G$ is adapted; by default all, as by the authors.

    **Returns:** an optax optimiser.

    **Raises:** as [`eqx_ensemble.methods.sampling.sgld`][].

    ```python
    sampler = ee.methods.sampling.psgld(1e-5, num_rows=100, adapt_steps=1000, key=key)
    samples = ee.methods.path.snapshots(sampler, 10, start=2000, every=100)
    ```

    ??? cite

        Li, Chen, Carlson and Carin, "Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks"
        (AAAI 2016).
    """
    name = "methods.sampling.psgld"
    at = rates(learning_rate, num_rows, temperature, name=name)
    decay = check_fraction(decay, "decay", name=name, allow=0)
    eps = check_eps(eps, name=name)
    adapt_steps = check_adapt_steps(adapt_steps, name=name)
    key = first_key(key, name=name)

    def init(params: PyTree) -> PSGLDState:
        check_weights(params, name=name)
        return PSGLDState(jnp.zeros((), jnp.int32), key, jax.tree.map(jnp.zeros_like, params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, PSGLDState]:
        del params, extra
        rate, std = at(state.count)
        noise = draw_noise(state.key, state.count, updates, std)
        new = jnp.asarray(1 - decay).astype(std.dtype)
        new = new if adapt_steps is None else jnp.where(state.count < adapt_steps, new, 0)
        squares = jax.tree.map(lambda s, g: s + new.astype(s.dtype) * (g**2 - s), state.squares, updates)

        def move(g: Array, s: Array, n: Array) -> Array:
            gain = 1 / (jnp.asarray(eps).astype(s.dtype) + jnp.sqrt(s))
            return jnp.sqrt(gain) * n - rate.astype(g.dtype) * gain * g

        moves = jax.tree.map(move, updates, squares, noise)
        return moves, PSGLDState(next_count(state.count), state.key, squares)

    return optax.GradientTransformationExtraArgs(init, update)
