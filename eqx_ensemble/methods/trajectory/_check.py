from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._caller import caller
from ..._check import check_counter, check_integer, check_number, is_traced, kind_text
from ..._pytree import PyTree
from ..._warnings import warn


def check_steps(start: Any, every: Any) -> None:
    """Raises unless `start` and `every` are numbers of steps, or traced integers."""
    for argument, value, least in (("start", start, 0), ("every", every, 1)):
        if is_traced(value):
            if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
                raise TypeError(
                    f"`{caller()}` needs an integer `{argument}`, got {value.dtype} of shape {value.shape}."
                )
        elif check_integer(value, argument, least=least) > 0:
            check_counter(value, argument)


def check_period(period: Any, start: Any, every: Any) -> None:
    """Raises unless `period` is `None`, traced, or a number of steps that includes a snapshot."""
    if period is None:
        return
    if is_traced(period):
        if period.ndim or not jnp.issubdtype(period.dtype, jnp.integer):
            raise TypeError(f"`{caller()}` needs an integer `period`, got {period.dtype} of shape {period.shape}.")
        return
    check_counter(period, "period")
    first = start if is_traced(start) or start else every
    if not is_traced(first) and first > period:
        raise ValueError(f"`{caller()}` takes no snapshot: the first is after {first} steps of each {period}.")


def check_decay(decay: Any) -> None:
    """Raises unless `decay` is a number from 0 to below 1; a traced one is not checked."""
    if is_traced(decay):
        if decay.ndim:
            raise TypeError(f"`{caller()}` needs one number `decay` per member, got shape {decay.shape}.")
        return
    if isinstance(decay, jax.Array) and decay.ndim == 0:
        decay = float(decay)
    if check_number(decay, "decay", least=0, most=1) == 1:
        raise ValueError(f"`{caller()}` needs `decay` below 1, got 1: the average would never move.")


def check_rank(rank: Any) -> int:
    """Raises unless `rank` is 0 or at least 2. Returns it."""
    rank = check_integer(rank, "rank", least=0)
    if rank == 1:
        raise ValueError(
            f"`{caller()}` needs `rank` to be 0 (diagonal only) or at least 2, got 1: the divisor `rank - 1` would be "
            "0."
        )
    return rank


def check_real(params: PyTree) -> None:
    """Raises for complex weights."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.iscomplexobj(x):
            raise TypeError(
                f"`{caller()}` needs real weights, got {x.dtype} at `{jax.tree_util.keystr(path)}`: a complex Gaussian "
                "has more than one covariance."
            )


def check_scale(scale: Any) -> None:
    """Raises unless `scale` is `None` or a number of at least 0."""
    if scale is not None:
        check_number(scale, "scale", least=0)


def check_learning_rate(value: Any, argument: str) -> Any:
    """Raises unless `value` is a number of at least 0; a traced one is not checked. Returns it as a Python number."""
    if is_traced(value):
        return value
    return check_number(float(value) if isinstance(value, jax.Array) else value, argument, least=0)


def check_record(are_last: Sequence[bool], wrappers: str, example: str) -> None:
    """Raises unless exactly one record exists, and its wrapper is the last transformation."""
    if not are_last:
        raise ValueError(
            f"`{caller()}` found no record in the optimiser state: train with an optimiser in a wrapper, {wrappers} of "
            f"`methods.trajectory`, as in `methods.trajectory.{example}`."
        )
    if len(are_last) > 1:
        raise ValueError(f"`{caller()}` found {len(are_last)} records, which is ambiguous: use one wrapper.")
    if not all(are_last):
        wrapper = example.partition("(")[0]
        raise ValueError(
            f"`{caller()}`: the wrapper is not the last part of `optax.chain`, so the weights that it recorded are not "
            f"those of the members.\nWrap the whole chain: `methods.trajectory.{wrapper}(optax.chain(...), ...)`."
        )


def check_same_leaves(params: PyTree, recorded: PyTree) -> None:
    """Raises if only some of the trained weights were recorded."""
    if jax.tree.structure(params) != jax.tree.structure(recorded):
        raise ValueError(
            f"`{caller()}`: the wrapper recorded only a part of the trained weights, as inside of `optax.masked` or "
            "`optax.multi_transform`.\nWrap the whole optimiser: `methods.trajectory.swa(optax.multi_transform(...))`."
        )


def warn_of_few(count: Any, *, least: int, effect: str) -> None:
    """Warns of members with fewer than `least` snapshots, unless they are traced."""
    if is_traced(count) or not getattr(count, "is_fully_addressable", True):
        return
    few = np.asarray(count) < least
    if few.any():
        what = "no snapshot" if least == 1 else f"fewer than {least} snapshots"
        listed = ", ".join(map(str, np.flatnonzero(few)))
        warn(f"`{caller()}`: members with {what}: {listed}. {effect}")


def check_inner_optimiser(value: Any) -> None:
    """Raises unless `value` is an optax optimiser itself, not a function that returns one."""
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"`{caller()}` needs an optax optimiser, got {kind_text(value)}.\nWrap the optimiser inside of the "
            f"function: `lambda hyper: {caller()}(optax.adam(hyper['lr']), ...)`."
        )
