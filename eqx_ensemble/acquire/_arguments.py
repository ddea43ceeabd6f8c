"""What the arguments of acquisition functions are."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._check import value_error
from .._leaves import as_column

Mode = Literal["min", "max"]


def sign_of(mode: Mode) -> int:
    """The factor that makes larger values better."""
    return 1 if mode == "max" else -1


def against(best: Array, like: Array) -> Array:
    """The best value, a number or one per member, to be subtracted from `like`."""
    best = best.astype(like.dtype)
    if best.shape not in ((), like.shape[:1]):
        got = f"expected shape () or {like.shape[:1]}, got {best.shape}"
        raise value_error("`best` as one number, or one per member", got, "Pass the best observed value alone.")
    return as_column(best, like.ndim) if best.ndim else best


def pool_of(
    num_candidates: int, row_weights: Bool[Array, " candidates"] | None, chosen: Integer[Array, " chosen"] | None
) -> tuple[Bool[Array, " candidates"], Int32[Array, " chosen"]]:
    """Which candidates may be picked, and which are chosen already; -1 is none."""
    may_pick = jnp.ones(num_candidates, bool) if row_weights is None else row_weights
    taken = jnp.zeros(0, jnp.int32) if chosen is None else chosen.astype(jnp.int32)
    taken = jnp.where((taken < 0) | ~may_pick[taken], -1, taken)
    return without(may_pick, taken), taken


def check_size(size: int, argument: str, num_candidates: int) -> None:
    """Raises unless there are as many candidates."""
    if size > num_candidates:
        raise value_error(f"`{argument}` candidates or more", f"got {num_candidates}, for {size} picks", "Pick fewer.")


def without(may_pick: Bool[Array, " candidates"], index: Int32[Array, "..."]) -> Bool[Array, " candidates"]:
    """The candidates without one, or several; -1 is none."""
    beyond = jnp.where(index < 0, may_pick.shape[0], index)
    return may_pick.at[beyond].set(False, mode="drop")


def argmax(values: Float[Array, " candidates"], may_pick: Bool[Array, " candidates"]) -> Int32[Array, ""]:
    """The first index of the largest value among those that may be picked and are not NaN; -1 if there is none."""
    fits = may_pick & ~jnp.isnan(values)
    ranked = jnp.where(fits, jnp.maximum(values, jnp.finfo(values.dtype).min), -jnp.inf)
    return jnp.where(jnp.any(fits), jnp.argmax(ranked), -1).astype(jnp.int32)
