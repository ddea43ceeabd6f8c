import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int32

from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._check import value_error
from .._keys import root
from .._weighting import blank_unweighted, log_mixture, mixture_moments, weighted_mean
from ._arguments import Mode, against, argmax, check_size, pool_of, sign_of, without


@array_function
def expected_improvement(
    mean: kinds.Members,
    variance: kinds.VariancesOrZero | None = None,
    *,
    best: kinds.Best,
    mode: Mode,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.CountedRows = None,
) -> Float[Array, "*batch"]:
    r"""How much candidates improve on the best value observed, $\mathrm{E} \max(f - f^*, 0)$, under the mixture.

    With `variance`, members are Gaussians, and this is the closed form $\sum_m w_m \sigma_m h(z_m)$ with $z_m = (\mu_m
    - f^*) / \sigma_m$ and $h(z) = \varphi(z) + z \Phi(z)$. Without it, members are samples: $\sum_m w_m \max(f_m - f^*,
    0)$.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`; variances may be zero. Without `variance`, `mean` are the samples.
    - `best`: $f^*$, a number; or one per member, `(members,)`, such as the best prediction for the observed points if
        observations are noisy.
    - `mode`: `"max"` if larger values are better; for `"min"` the signs of `mean` and `best` change.
    - `weights`: over members, `(members,)` or `(members, *rows)`.
    - `row_weights`: booleans `(*batch,)`; candidates that are `False` are ignored, even if NaN.

    **Returns:**

    `(*batch,)`, larger is better; minus infinity for ignored candidates.

    ```python
    mean, variance = jnp.array([[0.0, 1.0], [0.0, 2.0]]), jnp.ones((2, 2))
    # [0.083, 0.741]
    ee.acquire.expected_improvement(mean, variance, best=1.0, mode="max")
    ee.acquire.expected_improvement(mean, best=1.0, mode="max")  # [0.0, 0.5]
    ```

    ??? cite
        [Jones et al., Journal of Global Optimization 1998](https://doi.org/10.1023/A:1008306431147)
    """
    better, point, sigma, z = _standardise(mean, variance, best, mode, weights)
    found = weighted_mean(jnp.where(point, jnp.maximum(better, 0), sigma * _excess(z)), weights)
    return _of_counted(found, row_weights)


@array_function
def log_expected_improvement(
    mean: kinds.Members,
    variance: kinds.VariancesOrZero | None = None,
    *,
    best: kinds.Best,
    mode: Mode,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.CountedRows = None,
) -> Float[Array, "*batch"]:
    """The logarithm of [`eqx_ensemble.acquire.expected_improvement`][], accurate where that underflows.

    Optimisers of candidates need it: far from the best value, the expected improvement and its gradient are zero in
    floating point. Members are summed by log-sum-exp. The gradient is finite.

    **Arguments:**

    As [`eqx_ensemble.acquire.expected_improvement`][].

    **Returns:**

    `(*batch,)`; minus infinity for ignored candidates, and where no sample improves.

    ```python
    mean, variance = jnp.array([[-40.0]]), jnp.ones((1, 1))
    # -808.3, whose exponential is zero
    ee.acquire.log_expected_improvement(mean, variance, best=0.0, mode="max")
    ```

    ??? cite
        [Ament et al., NeurIPS 2023](https://arxiv.org/abs/2310.20708)
    """
    better, point, sigma, z = _standardise(mean, variance, best, mode, weights)
    worse = better <= 0
    certain = jnp.where(worse, -jnp.inf, jnp.log(jnp.where(worse, 1, better)))
    found = log_mixture(jnp.where(point, certain, jnp.log(sigma) + _log_excess(z)), weights)
    return _of_counted(found, row_weights)


@array_function
def probability_of_improvement(
    mean: kinds.Members,
    variance: kinds.VariancesOrZero | None = None,
    *,
    best: kinds.Best,
    mode: Mode,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.CountedRows = None,
) -> Float[Array, "*batch"]:
    r"""The probability that a candidate is better than the best value observed, $\sum_m w_m \Phi(z_m)$.

    Without `variance`, the weight of the members above `best`.

    **Arguments:**

    As [`eqx_ensemble.acquire.expected_improvement`][].

    **Returns:**

    `(*batch,)`; minus infinity for ignored candidates.

    ```python
    mean = jnp.array([[0.0, 1.0], [0.0, 2.0]])
    ee.acquire.probability_of_improvement(mean, best=1.0, mode="max")  # [0.0, 0.5]
    ```

    ??? cite
        [Kushner, Journal of Basic Engineering 1964](https://doi.org/10.1115/1.3653121)
    """
    better, point, _, z = _standardise(mean, variance, best, mode, weights)
    certain = jnp.where(jnp.isnan(better), better, (better > 0).astype(better.dtype))
    return _of_counted(weighted_mean(jnp.where(point, certain, ndtr(z)), weights), row_weights)


@array_function
def confidence_bound(
    mean: kinds.Members,
    variance: kinds.VariancesOrZero | None = None,
    *,
    beta: kinds.Beta,
    mode: Mode,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.CountedRows = None,
) -> Float[Array, "*batch"]:
    r"""The upper confidence bound (UCB), $\mu + \sqrt{\beta} \sigma$, of the mixture of the members.

    $\sigma^2$ is the total of [`eqx_ensemble.uncertainty.decompose_variance`][]; without `variance`, the disagreement
    of the members alone.

    **Arguments:**

    - `beta`: $\beta$, a number of zero or more. Some write $\kappa$ for its root.
    - the others: as for [`eqx_ensemble.acquire.expected_improvement`][].

    **Returns:**

    `(*batch,)`, larger is better: for `"min"` it is minus the lower bound, $-\mu + \sqrt{\beta} \sigma$. Minus infinity
    for ignored candidates.

    ```python
    mean = jnp.array([[0.0, 1.0], [2.0, 1.0]])
    ee.acquire.confidence_bound(mean, beta=4.0, mode="max")  # [3.0, 1.0]
    ```

    ??? cite
        [Srinivas et al., ICML 2010](https://arxiv.org/abs/0912.3995)
    """
    centre, total = mixture_moments(mean, jnp.zeros_like(mean) if variance is None else variance, weights)
    exact = total == 0  # where the gradient of the root is infinite
    deviation = jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, total)))
    return _of_counted(sign_of(mode) * centre + jnp.sqrt(beta) * deviation, row_weights)


def _of_counted(values: Float[Array, "*batch"], row_weights: Bool[Array, "*batch"] | None) -> Float[Array, "*batch"]:
    """The values, minus infinity for ignored candidates."""
    return values if row_weights is None else jnp.where(row_weights, values, -jnp.inf)


def _standardise(mean: Array, variance: Array | None, best: Array, mode: Mode, weights: Array | None) -> tuple:
    """How much better means are; which members are points, without variance or too far away for it to matter; standard
    deviations; z-scores.
    """
    better = blank_unweighted(sign_of(mode) * (mean - against(best, mean)), weights)
    variance = jnp.zeros_like(mean) if variance is None else variance
    far = jnp.finfo(better.dtype).max ** 0.45  # the square is still finite
    point = variance == 0
    point = point | (jnp.abs(better) > far * jnp.sqrt(jnp.where(point, 1, variance)))
    sigma = jnp.sqrt(jnp.where(point, 1, variance))
    return better, point, sigma, jnp.where(point, 0, better) / sigma


_TAIL = 2.0


@jax.custom_jvp
def _excess(z: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$\varphi(z) + z \Phi(z)$, the mean of $\max(z + e, 0)$ for standard Gaussian $e$, without cancellation."""
    near, x, is_far = _split(z)
    rest = _mills_rest(x)
    return jnp.where(is_far, norm.pdf(x) * (rest / (x + rest)), norm.pdf(near) + near * ndtr(near))


@_excess.defjvp
def _excess_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _excess(*primals), ndtr(primals[0]) * tangents[0]


@jax.custom_jvp
def _log_excess(z: Float[Array, "..."]) -> Float[Array, "..."]:
    """The logarithm of `_excess`, finite where that underflows."""
    near, x, is_far = _split(z)
    rest = _mills_rest(x)
    tail = -0.5 * x**2 - 0.5 * math.log(2 * math.pi) + jnp.log(rest / (x + rest))
    return jnp.where(is_far, tail, jnp.log(norm.pdf(near) + near * ndtr(near)))


@_log_excess.defjvp
def _log_excess_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    near, x, is_far = _split(primals[0])
    slope = jnp.where(is_far, 1 / _mills_rest(x), ndtr(near) / _excess(near))
    return _log_excess(*primals), slope * tangents[0]


def _split(z: Float[Array, "..."]) -> tuple[Array, Array, Array]:
    is_far = z < -_TAIL
    return jnp.where(is_far, 0, z), jnp.where(is_far, -z, _TAIL), is_far


def _mills_rest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$k$ in $\Phi(-x) / \varphi(x) = 1 / (x + k)$, for $x \ge 2$, by Laplace's continued fraction.

    $k = 1 / (x + 2 / (x + 3 / (x + \dots)))$, so that $1 - x \Phi(-x) / \varphi(x) = k / (x + k)$ has no difference
    in it: written as one it would lose $x^2$ roundings.
    """
    terms = 16 if x.dtype == jnp.float32 else 80
    rest: Any = (x + jnp.sqrt(x**2 + 4 * (terms + 1))) / 2  # where it converges to, for a constant numerator
    for i in range(terms, 1, -1):
        rest = x + i / rest
    return 1 / rest


class Regret(NamedTuple):
    """Regret after each step, of one shape: `simple`, of the best step so far, and `cumulative`, summed over steps."""

    simple: Float[Array, "*batch steps"]
    cumulative: Float[Array, "*batch steps"]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def regret(values: kinds.Evaluated, optimum: kinds.Optimum, *, mode: Mode) -> Regret:
    """How far the evaluated values are from the optimum, after each step.

    **Arguments:**

    - `values`: noise-free values or rewards `(*batch, steps)`, such as `(seeds, steps)`, in the order of evaluation.
    - `optimum`: the best value there is: one number, one per run `(*batch,)`, or, for contextual bandits, one per step.
    - `mode`: `"max"` if larger values are better, or `"min"`.

    **Returns:**

    [`eqx_ensemble.acquire.Regret`][] of arrays `(*batch, steps)`.

    ```python
    curves = ee.acquire.regret(jnp.array([1.0, 3.0, 2.0]), 4.0, mode="max")
    curves.simple, curves.cumulative  # [3.0, 1.0, 1.0], [3.0, 4.0, 6.0]
    ```
    """
    if optimum.shape not in ((), values.shape[:-1], values.shape):
        got = f"expected {values.shape}, {values.shape[:-1]} or (), got {optimum.shape}"
        raise value_error("one `optimum`, or one per run or step", got, "It is the best possible value.")
    if optimum.ndim and optimum.ndim < values.ndim:
        optimum = optimum[..., None]
    lost = sign_of(mode) * (optimum - values)
    return Regret(jax.lax.cummin(lost, axis=lost.ndim - 1), jnp.cumsum(lost, axis=-1))


@array_function
def thompson(
    predictions: kinds.PoolSamples,
    num_picks: int,
    *,
    mode: Mode,
    replace: bool = False,
    weights: kinds.Weights = None,
    row_weights: kinds.PoolRows = None,
    key: Any,
) -> Int32[Array, " picks"]:
    """Thompson sampling: each pick is the best candidate of one member, drawn by its weight.

    A member is a sample of the posterior; members are drawn with replacement. Picks differ unless `replace`: a member
    whose best candidate is taken picks its next best one, as botorch's `MaxPosteriorSampling(replacement=False)`.

    **Arguments:**

    - `predictions`: `(members, candidates)`. For a draw of the noise as well, or of Gaussian members, pass samples.
    - `num_picks`: the number of picks; 1 for a bandit.
    - `mode`: `"max"` or `"min"`.
    - `replace`: whether a candidate may be picked several times.
    - `weights`, `row_weights`: of members and candidates, as for [`eqx_ensemble.acquire.expected_improvement`][].
    - `key`: one threefry key, typed or legacy.

    **Returns:**

    Indices `(picks,)`; while tracing, -1 where no candidate is left.

    ```python
    predictions = jnp.array([[3.0, 2.0, 0.0], [2.0, 3.0, 0.0]])
    ee.acquire.thompson(predictions, 2, mode="max", key=key)  # 0 and 1
    ```

    ??? cite
        [Russo et al., Foundations and Trends in Machine Learning 2018](https://arxiv.org/abs/1707.02038)
    """
    if not replace:
        check_size(num_picks, "num_picks", predictions.shape[1])
    may_pick, _ = pool_of(predictions.shape[1], row_weights, None)
    members = jax.random.choice(root(key), predictions.shape[0], (num_picks,), p=weights)

    def step(may_pick: Array, member: Array) -> tuple[Array, Array]:
        index = argmax(sign_of(mode) * predictions[member], may_pick)
        return may_pick if replace else without(may_pick, index), index

    return jax.lax.scan(step, may_pick, members)[1]
