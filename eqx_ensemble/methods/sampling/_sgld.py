from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from ..._pytree import PyTree
from ._check import check_weights
from ._noise import draw_noise, first_key, next_count, rates


class SGLDState(NamedTuple):
    """The state of `sgld`: the number of steps done, and the key of the noise."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]


def sgld(
    learning_rate: Any, num_rows: Any, *, temperature: Any = 1.0, key: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic-gradient Langevin dynamics: gradient descent with noise, whose weights become posterior samples.

    With the gradient $g$ of the loss $L$, the learning rate $\eta$, $N$ rows and the temperature $T$, a step is

    $$w \leftarrow w - \eta\, g + \sqrt{2 \eta T / N}\; \xi, \qquad \xi \sim \mathcal N(0, I)$$

    The loss is a **mean** over rows of negative log-likelihoods plus $1/N$ of the negative log-prior
    ([`eqx_ensemble.methods.priors.gaussian_penalty`][]), so that $N L$ is the negative log-posterior, and small steps
    sample from $\exp(-N L / T)$. In the terms of a step $\epsilon$ on the log-posterior, $\eta = N \epsilon$; Welling
    and Teh write $\epsilon / 2$ for it.

    Steps are not corrected: where the loss has the curvature $h$, the variance is $T / (N h\,(1 - \eta h / 2))$ instead
    of $T / (N h)$. Gradients of batches add their own noise: with the variance $s^2$ of $g$, independent between steps,
    $(T / N + \eta s^2 / 2) / (h\,(1 - \eta h / 2))$. Both errors vanish with the learning rate.

    Each member is a chain with noise of its own, which follows from the key, its id and its number of steps. It runs in
    [`eqx_ensemble.fit`][] and [`eqx_ensemble.train.make_step`][], last in an `optax.chain`. Where `init` is mapped by
    other means, all members have the same noise.

    **Arguments:**

    - `learning_rate`: $\eta$, a number or an optax schedule; with `hyper`, each member's own. The noise follows it.
    - `num_rows`: $N$, the number of rows that the member is trained on: of all its rows, not of a batch.
    - `temperature`: $T$, a number or a schedule: 1 for the posterior, less for a colder one, 0 for gradient descent.
    - `key`: the key of the noise. A second run that should not repeat the first needs another; to continue a run,
        pass it to [`eqx_ensemble.fit`][].

    **Returns:** an optax optimiser. [`eqx_ensemble.methods.path.snapshots`][] around it keeps samples.

    **Raises:** `TypeError` or `ValueError` for invalid arguments; when it is initialised, `TypeError` for weights that
    are complex or of 16 bits, in which the noise of small steps is rounded away.

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
