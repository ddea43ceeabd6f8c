from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from .._brief import brief_repr


class Picks(NamedTuple):
    """A batch of candidates in the order of choice: `indices`, and the joint criterion after each pick, `values`.

    Both are `(size,)`. Indices are -1, and values stay the same, after the last candidate that the budget allows.
    """

    indices: Int32[Array, " size"]
    values: Float[Array, " size"]

    __repr__ = brief_repr


class Pool(NamedTuple):
    """The candidates that may be picked, what each of them costs, what was spent, and the budget."""

    may_pick: Bool[Array, " candidates"]
    costs: Float[Array, " candidates"] | None
    budget: Float[Array, ""] | None
    spent: Float[Array, ""]

    def pick(self, gains: Float[Array, " candidates"]) -> tuple[Int32[Array, ""], "Pool"]:
        """The affordable candidate of the largest gain per cost, -1 if there is none, and the pool without it."""
        fits = self.may_pick
        if self.costs is None:
            index = argmax(gains, fits)
            return index, self.remove(index)
        if self.budget is not None:  # sums of costs are rounded: three times 0.1 are not above 0.3
            fits = fits & (self.spent + self.costs <= self.budget * (1 + 16 * jnp.finfo(gains.dtype).eps))
        index = argmax(gains / self.costs, fits)
        cost = jnp.where(index < 0, 0, self.costs[index])
        return index, self.remove(index)._replace(spent=self.spent + cost)

    def remove(self, index: Int32[Array, "..."]) -> "Pool":
        """The pool without a candidate, or several; -1 is none."""
        beyond = jnp.where(index < 0, self.may_pick.shape[0], index)
        return self._replace(may_pick=self.may_pick.at[beyond].set(False, mode="drop"))


def argmax(values: Float[Array, " candidates"], fits: Bool[Array, " candidates"]) -> Int32[Array, ""]:
    """The first index of the largest value among those that fit and are not NaN; -1 if there is none."""
    fits = fits & ~jnp.isnan(values)
    ranked = jnp.where(fits, jnp.maximum(values, jnp.finfo(values.dtype).min), -jnp.inf)
    return jnp.where(jnp.any(fits), jnp.argmax(ranked), -1).astype(jnp.int32)
