import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._brief import brief_doc
from .._caller import caller
from .._check import RowWeightsLike, check_counted_rows, check_number
from ._check import check_level, check_rows
from ._enbpi import check_outcome
from ._quantile import value_at_rank


class Aci(eqx.Module):
    """The state of adaptive conformal inference between two steps of a series.

    **Attributes:**

    - `level`: the level of the next prediction, which may leave [0, 1].
    - `target`: the long-run coverage.
    - `rate`: the step size of the level.
    """

    level: Float[Array, ""]
    target: Float[Array, ""]
    rate: Float[Array, ""]

    __pdoc__ = brief_doc

    def quantile(
        self,
        scores: Float[ArrayLike, " rows"],
        *,
        row_weights: RowWeightsLike | None = None,
    ) -> Float[Array, ""]:
        """The bound of the next score: the conformal quantile of recent `scores` `(rows,)` at the current level.

        Infinite at a level of 1 or more, and for too few scores; minus infinity at a level of 0 or less.
        """
        (checked,) = check_rows(scores=scores)
        return _quantile(checked, check_counted_rows(row_weights, checked.shape).counted, self.level)

    def update(self, covered: Bool[ArrayLike, ""] | Real[ArrayLike, ""]) -> "Aci":
        """The state after a step; `covered` is whether the target was covered, or the fraction of covered targets."""
        part = check_outcome(covered).astype(self.level.dtype)
        return Aci(self.level + self.rate * (self.target - part), self.target, self.rate)


def aci(*, level: float, rate: float = 0.005) -> Aci:
    r"""Adaptive conformal inference: long-run coverage for any series, exchangeable or not.

    After each step the level changes by $\gamma (\mathrm{target} - \mathrm{covered})$. After $T$ steps

    $$\left| \tfrac{1}{T} \sum_t \mathrm{covered}_t - \mathrm{target} \right| \le
    \frac{\max(\mathrm{target}, 1 - \mathrm{target}) + \gamma}{\gamma T}$$

    for every series and model, if predictions contain everything at levels of 1 or more, and nothing at levels of 0 or
    less. A large rate adapts fast, but gives some unbounded or empty predictions.

    **Arguments:**

    - `level`: the target coverage, between 0 and 1.
    - `rate`: $\gamma$, a positive number; the authors use 0.005.

    **Returns:** [`eqx_ensemble.conformal.Aci`][], the initial state. For several series use `jax.vmap`.

    ```python
    errors = jnp.abs(jax.random.normal(key, (60,)))
    state = ee.conformal.aci(level=0.9, rate=0.05)
    for i in range(50, 60):
        bound = state.quantile(errors[i - 50 : i])
        state = state.update(errors[i] <= bound)
    ```

    ??? cite
        [Gibbs and Candès, NeurIPS 2021](https://arxiv.org/abs/2106.00170)
    """
    check_level(level)
    if check_number(rate, "rate", least=0) == 0:
        raise ValueError(f"`{caller()}` needs `rate` to be above zero, got {rate!r}.")
    start = jnp.asarray(level, float)
    return Aci(start, start, jnp.asarray(rate, float))


@jax.jit
def _quantile(
    scores: Float[Array, " rows"], counted: Bool[Array, " rows"] | None, level: Float[Array, ""]
) -> Float[Array, ""]:
    count = jnp.asarray(scores.size if counted is None else jnp.sum(counted), level.dtype)
    # A rank that is exceeded only by rounding of the level counts as reached.
    rank = jnp.ceil((count + 1) * level * (1 - 4 * jnp.finfo(level.dtype).eps))
    rank = jnp.clip(rank, 1, count + 1).astype(jnp.int32)
    found = value_at_rank(scores, counted, rank)
    found = jnp.where(level >= 1, jnp.inf, jnp.where(level <= 0, -jnp.inf, found))
    return jnp.where(jnp.isnan(level), jnp.nan, found)
