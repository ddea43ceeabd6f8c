"""Sampling from a posterior by stochastic-gradient MCMC, and diagnostics of the chains.

The samplers are optax optimisers: each member is a chain with independent noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from .. import _keys
from .._brief import brief_repr
from .._caller import caller
from .._check import missing_extra_message
from .._foreign import as_numpy
from .._pytree import PyTree

__all__ = ["Diagnostics", "diagnostics", "sghmc", "sgld"]


def sgld(
    learning_rate: Any, num_rows: Any, *, temperature: Any = 1.0, key: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic-gradient Langevin dynamics: gradient descent with noise, whose iterates are posterior samples.

    With the gradient $g$ of the loss $L$, the learning rate $\eta$, $N$ rows and the temperature $T$, a step is

    $$w \leftarrow w - \eta\, g + \sqrt{2 \eta T / N}\; \xi, \qquad \xi \sim \mathcal N(0, I)$$

    The loss is a **mean** over rows of negative log-likelihoods plus
    [`eqx_ensemble.methods.priors.gaussian_penalty`][]; small steps sample from $\exp(-N L / T)$.

    Steps have no Metropolis correction: with the curvature $h$ of the loss and the variance $s^2$ of $g$, the variance
    is $(T / N + \eta s^2 / 2) / (h\,(1 - \eta h / 2))$ instead of $T / (N h)$.

    Each member is a chain with independent noise. It is the last transformation of an `optax.chain`. Weights need 32
    bits or more: in fewer, small steps and their noise are rounded away.

    **Arguments:**

    - `learning_rate`: $\eta$, a number or an optax schedule; with `hyper`, one per member.
    - `num_rows`: $N$, the number of all training rows of the member, not of a batch.
    - `temperature`: $T$, a number or a schedule: 1 for the posterior, 0 for gradient descent.
    - `key`: the key of the noise; another run needs another key.

    **Returns:** an optax optimiser. Wrap it in [`eqx_ensemble.methods.trajectory.snapshots`][] to keep samples.

    ```python
    def loss(model, batch, key):
        x, y = batch
        nll = jnp.mean((jax.vmap(model)(x) - y) ** 2) / (2 * 0.1**2)
        return nll + ee.methods.priors.gaussian_penalty(model, num_rows=100)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (100, 3)), jnp.zeros((100, 1))
    sampler = ee.methods.sampling.sgld(1e-4, num_rows=100, key=key)
    chains = ee.methods.trajectory.snapshots(sampler, 5, start=50, every=10)
    run = ee.fit(ensemble, loss, chains, data, steps=90, key=key)
    samples = ee.methods.trajectory.snapshot_ensemble(run)  # 20 members, 5 of each chain
    ```

    ??? cite
        [Welling and Teh 2011](https://dl.acm.org/doi/10.5555/3104482.3104568)
    """
    return _sampler(learning_rate, num_rows, None, temperature, key)


def sghmc(
    learning_rate: Any, num_rows: Any, *, friction: Any = 0.1, temperature: Any = 1.0, key: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic-gradient Hamiltonian Monte Carlo: gradient descent with momentum and noise.

    In the notation of [`eqx_ensemble.methods.sampling.sgld`][], with the friction $a$, a step is

    $$v \leftarrow (1 - a)\, v - \eta\, g + \sqrt{2 a \eta T / N}\; \xi, \qquad w \leftarrow w + v$$

    It is `optax.sgd(learning_rate, momentum=1 - friction)` with noise; $a = 1$ is SGLD. Momentum moves a chain further
    in the same number of steps, and multiplies the effect of minibatch noise by $1 / a$.

    **Arguments:**

    - `learning_rate`, `num_rows`, `temperature`, `key`: as for [`eqx_ensemble.methods.sampling.sgld`][].
    - `friction`: $a$, above 0 and at most 1.

    **Returns:** an optax optimiser.

    ```python
    sampler = ee.methods.sampling.sghmc(1e-4, num_rows=100, friction=0.1, key=key)
    ```

    ??? cite
        [Chen et al. 2014](https://arxiv.org/abs/1402.4102), equation 15
    """
    return _sampler(learning_rate, num_rows, friction, temperature, key)


class ChainState(NamedTuple):
    """The state of a sampler: the number of steps, the key of the noise, and the velocity of SGHMC."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]
    velocity: PyTree = None

    def __repr__(self) -> str:
        return brief_repr(self)


def _sampler(
    learning_rate: Any, num_rows: Any, friction: Any, temperature: Any, key: Any
) -> optax.GradientTransformationExtraArgs:
    """SGHMC; without friction SGLD, which has no velocity."""
    first_key = jax.random.fold_in(_keys.root(key), np.uint32(_keys.tag("sampling")))  # training derives the members'

    def init(params: PyTree) -> ChainState:
        velocity = None if friction is None else jax.tree.map(jnp.zeros_like, params)
        return ChainState(jnp.zeros((), jnp.int32), first_key, velocity)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, ChainState]:
        del params, extra
        number = lambda x: jnp.asarray(x(state.count) if callable(x) else x).astype(jnp.result_type(float))
        rate, drag = number(learning_rate), number(1 if friction is None else friction)
        std = jnp.sqrt(2 * drag * rate * number(temperature) / number(num_rows))
        noise = _draw_noise(jax.random.fold_in(state.key, state.count), updates, std)
        moves = jax.tree.map(lambda g, n: n - rate.astype(g.dtype) * g, updates, noise)
        if friction is not None:
            moves = jax.tree.map(lambda v, x: (1 - drag).astype(x.dtype) * v + x, state.velocity, moves)
        count = jnp.asarray(optax.safe_increment(state.count))
        return moves, ChainState(count, state.key, None if friction is None else moves)

    return optax.GradientTransformationExtraArgs(init, update)


def _draw_noise(key: Key[Array, ""], like: PyTree, std: Float[Array, ""]) -> PyTree:
    """Gaussian noise for one step, with the shapes and dtypes of `like`.

    The stream of each leaf is derived from its path, because parts of an `optax.multi_transform` share leaf numbers.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    drawn = []
    for i, (path, x) in enumerate(leaves):
        of_path = jax.random.fold_in(key, np.uint32(_keys.tag(jax.tree_util.keystr(path))))
        own = jax.random.fold_in(of_path, i)
        drawn.append(std.astype(x.dtype) * jax.random.normal(own, x.shape, x.dtype))
    return jax.tree.unflatten(treedef, drawn)


class Diagnostics(NamedTuple):
    r"""Convergence diagnostics of chains, per quantity.

    **Attributes:**

    - `rhat`: the rank-normalised split $\hat R$, the maximum over draws and folded draws. Above 1.01 the chains have
        not converged. NaN for a single chain.
    - `ess_bulk`: the bulk effective sample size of all chains together.
    - `ess_tail`: the tail effective sample size, the minimum over the 5 % and 95 % quantiles.
    """

    rhat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray

    def __repr__(self) -> str:
        return brief_repr(self)


def diagnostics(values: Any, chains: Any) -> Diagnostics:
    r"""Rank-normalised split $\hat R$ and effective sample sizes of quantities over several chains, by ArviZ.

    Diagnose predictions rather than weights. Agreement of chains does not detect bias from step sizes, minibatch noise
    and missing modes.

    **Arguments:**

    - `values`: `(members, ...)`, one value of each quantity per sample, such as the result of
        [`eqx_ensemble.predict`][], the samples of each chain in the order in which they were drawn.
    - `chains`: integers `(members,)`: the chain of each sample, for snapshots those of
        [`eqx_ensemble.methods.trajectory.snapshot_owners`][].
        Each chain needs the same number of samples, at least 4.

    **Returns:** [`eqx_ensemble.methods.sampling.Diagnostics`][] of NumPy arrays `(...)`; NaN for quantities that are
    not finite.

    **Raises:** `ImportError` without ArviZ (the extra `sampling`); `ValueError` for chains of different lengths.

    ```python
    predictions = jax.random.normal(key, (4 * 50, 3))  # 4 chains of 50 samples
    found = ee.methods.sampling.diagnostics(predictions, np.arange(200) // 50)
    found.rhat.shape  # (3,)
    ```

    ??? cite
        [Vehtari et al. 2021](https://arxiv.org/abs/1903.08008)
    """
    array = as_numpy(values, "values").astype(np.float64)
    numbers, lengths = np.unique(as_numpy(chains, "chains"), return_counts=True)
    if lengths.sum() != len(array) or np.ptp(lengths):  # of chains that stopped or diverged
        listed = ", ".join(f"{number}: {length}" for number, length in zip(numbers, lengths, strict=True))
        needs = f"a chain for each of {len(array)} samples, and chains of one length"
        raise ValueError(f"`{caller()}` needs {needs}; got {listed}.")
    try:
        from arviz_stats.base.array import array_stats  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "ArviZ", "sampling")) from error
    axes: Any = {"chain_axis": 0, "draw_axis": 1}
    draws = array[np.argsort(chains, kind="stable")].reshape(len(numbers), -1, *array.shape[1:])
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (
            array_stats.rhat(draws, **axes, method="rank"),
            array_stats.ess(draws, **axes, method="bulk"),
            array_stats.ess(draws, **axes, method="tail", prob=(0.05, 0.95)),
        )
    finite = np.isfinite(draws).all(axis=(0, 1))
    return Diagnostics(*(np.where(finite, x, np.nan) for x in found))
