import math

import jax

from ._plans import AbstractPlan, Chunked, Sequential, Unrolled, Vmap
from ._traits import Traits

_BUSY_FLOPS = 4e6  # where one member's step keeps a processor core busy, measured for dense models; see `benchmarks/`
_MOST_UNROLLED = 64


def candidates(traits: Traits, num_members: int, *, steps_inside: bool, scan: bool | None = None) -> list[AbstractPlan]:
    """The plans that make sense for a program, the most promising first.

    `steps_inside` says that each member does several steps in a row: weights then stay in a cache when members take
    turns, while a single step has to fetch them.
    """
    everyone = Vmap(scan=scan)
    if num_members == 1:
        return [everyone]
    on_cpu = jax.default_backend() == "cpu"
    some, each = Chunked(math.ceil(math.sqrt(num_members)), scan=scan), Sequential(scan=scan)
    if traits.convolutions:
        apart: list[AbstractPlan] = [Unrolled(scan=scan)] if num_members <= _MOST_UNROLLED else []
        if not on_cpu:
            return [everyone, *apart, some]
        # `Sequential` is a compiled loop, where convolutions are slow, except in `fit`.
        return [each, everyone, *apart] if steps_inside and scan is not True else [everyone, *apart]
    if not on_cpu:
        return [everyone, some, each]
    busy = traits.flops > _BUSY_FLOPS or traits.batched_products > 0
    return [each, everyone, some] if busy and steps_inside else [everyone, each, some]


def smaller(plan: AbstractPlan, num_members: int) -> AbstractPlan | None:
    """The next plan that needs less memory; `None` below one member at a time."""
    size = plan.size if isinstance(plan, Chunked) else 1 if isinstance(plan, Sequential) else num_members
    half = min(size, num_members) // 2
    if half < 1:
        return None
    return Sequential(scan=plan.scan) if half == 1 else Chunked(half, scan=plan.scan)
