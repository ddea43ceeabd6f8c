import math

import jax

from ._cost import Cost
from ._plans import AbstractPlan, Chunked, Sequential, Unrolled, Vmap

_BUSY_FLOPS = 4e6  # above this one member's step saturates a core, measured for dense models; see `benchmarks/`
_MOST_UNROLLED = 64


def candidates(cost: Cost, num_members: int, *, steps_inside: bool, scan: bool | None = None) -> list[AbstractPlan]:
    """The suitable plans for a program, the most promising first.

    `steps_inside` and `scan` are those of [`Work`][eqx_ensemble.plan._plans.Work].
    """
    if num_members == 1:
        return [Vmap()]
    on_cpu = jax.default_backend() == "cpu"
    chunks = Chunked(math.ceil(math.sqrt(num_members)))
    if cost.convolutions:
        unrolled: list[AbstractPlan] = [Unrolled()] if num_members <= _MOST_UNROLLED else []
        if not on_cpu:
            return [Vmap(), *unrolled, chunks]
        # `Sequential` is a compiled loop, where convolutions are slow, except in `fit`.
        return [Sequential(), Vmap(), *unrolled] if steps_inside and scan is not True else [Vmap(), *unrolled]
    if not on_cpu:
        return [Vmap(), chunks, Sequential()]
    busy = cost.flops > _BUSY_FLOPS or cost.batched_products > 0
    return [Sequential(), Vmap(), chunks] if busy and steps_inside else [Vmap(), Sequential(), chunks]
