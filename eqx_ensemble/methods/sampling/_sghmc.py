from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from ..._pytree import PyTree
from ._check import check_fraction, check_weights
from ._noise import draw_noise, first_key, next_count, rates


class SGHMCState(NamedTuple):
    """The state of `sghmc`: the number of steps, the key of the noise, and the velocity."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]
    velocity: PyTree


def sghmc(
    learning_rate: Any, num_rows: Any, *, friction: Any = 0.1, temperature: Any = 1.0, key: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic-gradient Hamiltonian Monte Carlo: gradient descent with momentum and noise.

    With the gradient $g$ of the loss $L$, the learning rate $\eta$, the friction $a$, $N$ rows and the temperature $T$,
    a step is

    $$v \leftarrow (1 - a)\, v - \eta\, g + \sqrt{2 a \eta T / N}\; \xi, \qquad w \leftarrow w + v$$

    with $\xi \sim \mathcal N(0, I)$: `optax.sgd(learning_rate, momentum=1 - friction)` with noise. The loss, the rows
    and the target distribution are those of [`eqx_ensemble.methods.sampling.sgld`][], to which it reduces at $a = 1$.
    Momentum moves a chain further in the same number of steps. If the loss has curvature $h$, and minibatch gradients
    have variance $s^2$, independent between steps, the variance is
    $(T / N + \eta s^2 / (2 a)) / (h\,(1 - \eta h / (2 (2 - a))))$ instead of $T / (N h)$: momentum multiplies the
    effect of minibatch noise by $1 / a$.

    This is the form of Chen et al. in which the velocity includes the step size, without an estimate of the gradient
    noise. The velocity starts at 0 and is not resampled.

    **Arguments:**

    - `learning_rate`, `num_rows`, `temperature`, `key`: as for [`eqx_ensemble.methods.sampling.sgld`][].
    - `friction`: $a$, above 0 and at most 1.

    **Returns:** an optax optimiser.

    **Raises:** as [`eqx_ensemble.methods.sampling.sgld`][].

    ```python
    sampler = ee.methods.sampling.sghmc(1e-4, num_rows=100, friction=0.1, key=key)
    ```

    ??? cite

        Chen, Fox and Guestrin, "Stochastic Gradient Hamiltonian Monte Carlo" (ICML 2014), equation 15.
    """
    name = "methods.sampling.sghmc"
    at = rates(learning_rate, num_rows, temperature, name=name)
    friction = check_fraction(friction, "friction", name=name, allow=1)
    key = first_key(key, name=name)

    def init(params: PyTree) -> SGHMCState:
        check_weights(params, name=name)
        return SGHMCState(jnp.zeros((), jnp.int32), key, jax.tree.map(jnp.zeros_like, params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SGHMCState]:
        del params, extra
        rate, std = at(state.count)
        drag = jnp.asarray(friction).astype(std.dtype)
        noise = draw_noise(state.key, state.count, updates, jnp.sqrt(drag) * std)
        velocity = jax.tree.map(
            lambda v, g, n: (1 - drag).astype(g.dtype) * v - rate.astype(g.dtype) * g + n,
            state.velocity, updates, noise,
        )  # fmt: skip
        return velocity, SGHMCState(next_count(state.count), state.key, velocity)

    return optax.GradientTransformationExtraArgs(init, update)
