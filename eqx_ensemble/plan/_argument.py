import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from .._caller import caller
from .._check import MemberMismatchError, path_text
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ..tree._engine import static_gap
from ._cores import Cores
from ._memory import is_out_of_memory
from ._plans import AbstractPlan, Vmap


def check_plan(value: Any) -> None:
    """Raises unless `value` is a plan, not its class."""
    if isinstance(value, AbstractPlan):
        return
    hint = "For example `plan.Vmap()`."
    if isinstance(value, type):
        hint = f"Pass an instance: `{value.__name__}(...)`."
    plans = "`Cores()`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`"
    raise TypeError(f"`plan` must be one of {plans}, got {value!r}.\n{hint}")


def out_of_memory_message(num_members: int, plan: str, less: str | None, error: str) -> str:
    """The message that memory has run out, with a plan to try."""
    first = error.splitlines()[0] if error else "RESOURCE_EXHAUSTED"
    hint = f"Try `plan={less}`."
    if less is None:
        hint = "Not even one member at a time fits: choose a smaller `batch_size`."
    return f"`{caller()}` ran out of memory with {num_members} members under `{plan}`: {first}\n{hint}"


def plan_in_program(plan: AbstractPlan) -> AbstractPlan | None:
    """What of a plan distinguishes compiled programs: nothing if its options only choose others."""
    return None if isinstance(plan, Cores) else plan


def check_equal_constants(outputs: list[PyTree]) -> None:
    """Raises unless the outputs that are not arrays are equal in all calls of a function of one member."""
    if len(outputs) < 2:  # traced once for all members
        return
    first, *others = ({path_text(path): x for path, x in jax.tree.leaves_with_path(output)} for output in outputs)
    for other in others:
        seen: dict[Any, Any] = {}
        for path in first | other:
            gap = static_gap(first.get(path), other.get(path), seen)
            if gap is not None:
                texts, location = (leaf_text(gap.expected), leaf_text(gap.got)), gap.location()
                got = f"two values of {texts[0]}" if texts[0] == texts[1] else f"{texts[0]} and {texts[1]}"
                raise MemberMismatchError(
                    f"`{caller()}` returns outputs that are not arrays once: they must be equal for all members.\n"
                    f"  at `{path or '<root>'}`: got {got}{location and f' in {location}'}\n"
                    "Return an array, which gains the axis `members`: `jnp.asarray(x)` in place of `float(x)`."
                )


@contextlib.contextmanager
def explain_memory(plan: AbstractPlan, num_members: int) -> Iterator[None]:
    """Raises a `MemoryError` that names a smaller plan when a compiled program runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        less = plan.smaller(num_members)
        next_one = None if less is None else repr(less)
        raise MemoryError(out_of_memory_message(num_members, repr(plan), next_one, str(error))) from error


AnyPlan = AbstractPlan | None
"""The argument `plan` of functions; `None` is their default."""


def as_plan(plan: AnyPlan) -> AbstractPlan:
    """The plan of an argument `plan`, checked."""
    plan = Vmap() if plan is None else plan
    check_plan(plan)
    return plan
