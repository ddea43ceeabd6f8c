from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from ... import _keys
from ..._caller import caller
from ..._check import check_counter, check_number, is_traced
from ..._leaf_text import leaf_text
from ..._pytree import PyTree


def _check_scalar(value: Any, argument: str) -> Any:
    """Raises unless `value` is one real number. Returns it as a Python number, unless it is traced."""
    if is_traced(value):
        if value.ndim or not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
            raise TypeError(f"`{caller()}` needs one number `{argument}` per member, got {leaf_text(value)}.")
        return value
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and value.dtype != bool:
        value = value.item()
    return check_number(value, argument)


def check_rate(value: Any, argument: str, *, schedules: bool = True) -> Any:
    """Raises unless `value` is a number of at least 0, or a schedule. Returns it."""
    if schedules and callable(value):
        return value
    value = _check_scalar(value, argument)
    if not is_traced(value) and value < 0:
        raise ValueError(f"`{caller()}` needs `{argument}` to be at least 0, got {value!r}.")
    return value


def check_num_rows(value: Any) -> Any:
    """Raises unless `value` is above 0; a traced one is not checked."""
    value = _check_scalar(value, "num_rows")
    if not is_traced(value) and value <= 0:
        raise ValueError(
            f"`{caller()}` needs `num_rows` to be above 0, got {value!r}: the number of rows that a member is trained "
            "on."
        )
    return value


def check_fraction(value: Any, argument: str, *, allow: int) -> Any:
    """Raises unless `value` is between 0 and 1, exclusive except for `allow`. Returns it."""
    value = _check_scalar(value, argument)
    if not is_traced(value) and not (0 < value < 1 or value == allow):
        wanted = "above 0 and at most 1" if allow else "at least 0 and below 1"
        raise ValueError(f"`{caller()}` needs `{argument}` to be {wanted}, got {value!r}.")
    return value


def check_eps(value: Any) -> Any:
    """Raises unless `value` is above 0."""
    value = _check_scalar(value, "eps")
    if not is_traced(value) and value <= 0:
        raise ValueError(f"`{caller()}` needs `eps` to be above 0, got {value!r}.")
    return value


def check_adapt_steps(value: Any) -> Any:
    """Raises unless `value` is `None` or a number of steps."""
    if value is None:
        return None
    if is_traced(value):
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"`{caller()}` needs an integer `adapt_steps` per member, got {leaf_text(value)}.")
        return value
    return check_counter(value, "adapt_steps")


def check_explore(value: Any) -> float:
    """Raises unless `value` is from 0 to below 1. Returns it."""
    number = check_number(value, "explore", least=0, most=1)
    if number == 1:
        raise ValueError(f"`{caller()}` needs `explore` below 1, got {value!r}: no step would be left to sample in.")
    return number


def check_weights(params: PyTree) -> None:
    """Raises for weights whose dtype does not allow sampling."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        where, dtype = jax.tree_util.keystr(path), jnp.asarray(x).dtype
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
            why = "a complex Gaussian has more than one covariance"
            if jnp.issubdtype(dtype, jnp.floating):
                why = "small steps and their noise would be rounded away"
            raise TypeError(
                f"`{caller()}` needs weights in float32 or float64, got {dtype} at `{where}`: {why}.\nCast inside the "
                "loss where it should compute in fewer bits, or leave the weights out with `trainable=`."
            )


Rates = Callable[[Int[Array, ""]], tuple[Float[Array, ""], Float[Array, ""]]]
"""The learning rate and the standard deviation of the noise in a step."""


def rates(learning_rate: Any, num_rows: Any, temperature: Any) -> Rates:
    """Returns a function of a step's learning rate and noise, `sqrt(2 * rate * temperature / num_rows)`."""
    learning_rate = check_rate(learning_rate, "learning_rate")
    temperature = check_rate(temperature, "temperature")
    num_rows = check_num_rows(num_rows)

    def at(count: Int[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        rate, heat = _number(learning_rate, count), _number(temperature, count)
        return rate, jnp.sqrt(2 * rate * heat / _number(num_rows, count))

    return at


def _number(value: Any, count: Int[Array, ""]) -> Float[Array, ""]:
    return jnp.asarray(value(count) if callable(value) else value).astype(jnp.result_type(float))


def first_key(key: Any) -> Key[Array, ""]:
    """The key in the initial state of a sampler, from which training derives one key per member."""
    return jax.random.fold_in(_keys.root(key), np.uint32(_keys.tag("sampling")))


def draw_noise(key: Key[Array, ""], count: Int[Array, ""], like: PyTree, std: Float[Array, ""]) -> PyTree:
    """Gaussian noise for one step, with the shapes and dtypes of `like`.

    The stream of each leaf is derived from its path, because parts of an `optax.multi_transform` share leaf numbers.
    """
    of_step = jax.random.fold_in(key, count)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    drawn = []
    for i, (path, x) in enumerate(leaves):
        of_path = jax.random.fold_in(of_step, np.uint32(_keys.tag(jax.tree_util.keystr(path))))
        own = jax.random.fold_in(of_path, i)
        drawn.append(std.astype(x.dtype) * jax.random.normal(own, x.shape, x.dtype))
    return jax.tree.unflatten(treedef, drawn)


def next_count(count: Int[Array, ""]) -> Int[Array, ""]:
    """The number of steps plus one, without overflow."""
    return jnp.asarray(optax.safe_increment(count))


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

    without the term $\Gamma$: while $G$ adapts, samples are biased for any step size; after `adapt_steps`, the chain is
    as exact as SGLD. The first steps are large: start from trained members, or warm up the learning rate.

    **Arguments:**

    - `learning_rate`, `num_rows`, `temperature`, `key`: as for [`eqx_ensemble.methods.sampling.sgld`][].
    - `decay`: $\lambda$, from 0 to below 1.
    - `eps`: $\varepsilon$, above 0; the step size of a weight is at most $1 / \varepsilon$ times the learning rate.
    - `adapt_steps`: the number of steps in which $G$ is adapted; by default all. Sample after them.

    **Returns:** an optax optimiser.

    ```python
    sampler = ee.methods.sampling.psgld(1e-5, num_rows=100, adapt_steps=1000, key=key)
    samples = ee.methods.trajectory.snapshots(sampler, 10, start=2000, every=100)
    ```

    ??? cite
        [Li et al. 2016](https://arxiv.org/abs/1512.07666)
    """
    at = rates(learning_rate, num_rows, temperature)
    decay = check_fraction(decay, "decay", allow=0)
    eps = check_eps(eps)
    adapt_steps = check_adapt_steps(adapt_steps)
    key = first_key(key)

    def init(params: PyTree) -> PSGLDState:
        check_weights(params)
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


class SGHMCState(NamedTuple):
    """The state of `sghmc`: the number of steps, the key of the noise, and the velocity."""

    count: Int[Array, "*members"]
    key: Key[Array, "*members"]
    velocity: PyTree


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
    at = rates(learning_rate, num_rows, temperature)
    friction = check_fraction(friction, "friction", allow=1)
    key = first_key(key)

    def init(params: PyTree) -> SGHMCState:
        check_weights(params)
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


def cyclical_temperature(
    period: int, *, explore: float = 0.9, temperature: Any = 1.0
) -> Callable[[Any], Float[Array, ""]]:
    """The temperature of cyclical stochastic-gradient MCMC: 0 while a cycle explores, then that of sampling.

    Use it with the learning rate of [`eqx_ensemble.methods.trajectory.snapshot_schedule`][]. Chains visit several
    modes, but not in proportion to their posterior mass.

    **Arguments:**

    - `period`: the number of steps per cycle; the authors use 50 epochs.
    - `explore`: the fraction of each cycle without noise, from 0 to below 1.
    - `temperature`: the temperature of the other steps, a number.

    **Returns:** a schedule for `temperature` of [`eqx_ensemble.methods.sampling.sgld`][] and the other samplers.

    ```python
    period = 50 * 10  # epochs, of 10 batches each
    sampler = ee.methods.sampling.sghmc(
        ee.methods.trajectory.snapshot_schedule(1e-3, period),
        num_rows=1000,
        temperature=ee.methods.sampling.cyclical_temperature(period),
        key=key,
    )
    # after epochs 48, 49 and 50 of each of four cycles
    chains = ee.methods.trajectory.snapshots(
        sampler, 12, start=48 * 10, every=10, period=period
    )
    ```

    ??? cite
        [Zhang et al. 2020](https://arxiv.org/abs/1902.03932)
    """
    period = check_counter(period, "period")
    first = min(round(check_explore(explore) * period), period - 1)
    heat = check_rate(temperature, "temperature", schedules=False)

    def schedule(count: Any) -> Float[Array, ""]:
        return jnp.where(count % period >= first, jnp.asarray(heat).astype(jnp.result_type(float)), 0)

    return schedule


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

    The loss is a **mean** over rows of negative log-likelihoods plus
    [`eqx_ensemble.methods.priors.gaussian_penalty`][]; small steps sample from $\exp(-N L / T)$.

    Steps have no Metropolis correction: with the curvature $h$ of the loss and the variance $s^2$ of $g$, the variance
    is $(T / N + \eta s^2 / 2) / (h\,(1 - \eta h / 2))$ instead of $T / (N h)$.

    Each member is a chain with independent noise. It is the last transformation of an `optax.chain`.

    **Arguments:**

    - `learning_rate`: $\eta$, a number or an optax schedule; with `hyper`, one per member.
    - `num_rows`: $N$, the number of all training rows of the member, not of a batch.
    - `temperature`: $T$, a number or a schedule: 1 for the posterior, 0 for gradient descent.
    - `key`: the key of the noise; another run needs another key.

    **Returns:** an optax optimiser. Wrap it in [`eqx_ensemble.methods.trajectory.snapshots`][] to keep samples.

    **Raises:** `TypeError`, when initialised, for weights of fewer than 32 bits, in which the noise is rounded away.

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
    at = rates(learning_rate, num_rows, temperature)
    key = first_key(key)

    def init(params: PyTree) -> SGLDState:
        check_weights(params)
        return SGLDState(jnp.zeros((), jnp.int32), key)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SGLDState]:
        del params, extra
        rate, std = at(state.count)
        noise = draw_noise(state.key, state.count, updates, std)
        moves = jax.tree.map(lambda g, n: n - rate.astype(g.dtype) * g, updates, noise)
        return moves, SGLDState(next_count(state.count), state.key)

    return optax.GradientTransformationExtraArgs(init, update)
