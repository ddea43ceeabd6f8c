from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from ..._pytree import PyTree
from ._check import check_weights
from ._noise import draw_noise, first_key, next_count, rates


class SGLDState(NamedTuple):
    """The state of `sgld`: the number of steps, and the key of the noise."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]


def sgld(
    learning_rate: Any, num_rows: Any, *, temperature: Any = 1.0, key: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic-gradient Langevin dynamics: gradient descent with noise, whose iterates are posterior samples.

    With the gradient $g$ of the loss $L$, the learning rate $\eta$, $N$ rows and the temperature $T$, a step is

    $$w \leftarrow w - \eta\, g + \sqrt{2 \eta T / N}\; \xi, \qquad \xi \sim \mathcal N(0, I)$$

    The loss is a **mean** over rows of negative log-likelihoods plus $1/N$ of the negative log-prior
    ([`eqx_ensemble.methods.priors.gaussian_penalty`][]), so that $N L$ is the negative log-posterior, and small steps
    sample from $\exp(-N L / T)$. For a step size $\epsilon$ on the log-posterior, $\eta = N \epsilon$; Welling and Teh
    write $\epsilon / 2$ for it.

    Steps have no Metropolis correction: if the loss has curvature $h$, the variance is $T / (N h\,(1 - \eta h / 2))$
    instead of $T / (N h)$. Minibatch gradients add noise: with the variance $s^2$ of $g$, independent between steps,
    the variance is $(T / N + \eta s^2 / 2) / (h\,(1 - \eta h / 2))$. Both errors vanish with the learning rate.

    Each member is a chain with independent noise, derived from the key, the member's id and its number of steps. Use it
    in [`eqx_ensemble.fit`][] and [`eqx_ensemble.train.make_step`][], as the last transformation of an `optax.chain`. If
    `init` is mapped over members in another way, all members have the same noise.

    **Arguments:**

    - `learning_rate`: $\eta$, a number or an optax schedule; with `hyper`, one per member. It also scales the noise.
    - `num_rows`: $N$, the number of all training rows of the member, not of a batch.
    - `temperature`: $T$, a number or a schedule: 1 for the posterior, below 1 for a cold posterior, 0 for gradient
        descent.
    - `key`: the key of the noise. An independent second run needs another key; to continue a run, pass the run to
        [`eqx_ensemble.fit`][].

    **Returns:** an optax optimiser. Wrap it in [`eqx_ensemble.methods.path.snapshots`][] to keep samples.

    **Raises:** `TypeError` or `ValueError` for invalid arguments; when initialised, `TypeError` for weights that are
    complex or have fewer than 32 bits, in which the noise of small steps is rounded away.

    ```python
    def loss(model, batch, key):
        x, y = batch
        nll = jnp.mean((jax.vmap(model)(x) - y) ** 2) / (2 * 0.1**2)
        return nll + ee.methods.priors.gaussian_penalty(model, num_rows=100)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (100, 3)), jnp.zeros((100, 1))
    sampler = ee.methods.sampling.sgld(1e-4, num_rows=100, key=key)
    chains = ee.methods.path.snapshots(sampler, 5, start=50, every=10)
    run = ee.fit(ensemble, loss, chains, data, steps=90, key=key)
    samples = ee.methods.path.snapshot_ensemble(run)  # 20 members, 5 of each chain
    ```

    ??? cite

        Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics" (ICML 2011).
    """
    name = "methods.sampling.sgld"
    at = rates(learning_rate, num_rows, temperature, name=name)
    key = first_key(key, name=name)

    def init(params: PyTree) -> SGLDState:
        check_weights(params, name=name)
        return SGLDState(jnp.zeros((), jnp.int32), key)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SGLDState]:
        del params, extra
        rate, std = at(state.count)
        noise = draw_noise(state.key, state.count, updates, std)
        moves = jax.tree.map(lambda g, n: n - rate.astype(g.dtype) * g, updates, noise)
        return moves, SGLDState(next_count(state.count), state.key)

    return optax.GradientTransformationExtraArgs(init, update)
