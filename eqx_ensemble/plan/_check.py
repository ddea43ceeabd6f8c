from typing import Any

import jax

from .. import _axes
from .._caller import caller
from .._check import MemberMismatchError, path_text
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ..tree._engine import static_gap
from ._plans import AbstractPlan


def check_plan(value: Any) -> None:
    """Raises unless `value` is a plan, not its class; the caller has converted `"auto"`."""
    if isinstance(value, AbstractPlan):
        return
    hint = "For example `plan.Vmap()`."
    if isinstance(value, type):
        hint = f"Pass an instance: `{value.__name__}(...)`."
    plans = '`"auto"`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`'
    raise TypeError(f"`plan` must be one of {plans}, got {value!r}.\n{hint}")


def smaller_plan_message(plan: str, less: str) -> str:
    """The warning that a plan needs too much memory."""
    return f"`{caller()}` ran out of memory under `{plan}` and continues under `{less}`."


def out_of_memory_message(num_members: int, plan: str, less: str | None, error: str) -> str:
    """The message that memory has run out, with a plan to try."""
    first = error.splitlines()[0] if error else "RESOURCE_EXHAUSTED"
    hint = f'Try `plan={less}`, or `plan="auto"`, which searches for a plan that fits.'
    if less is None:
        hint = "Not even one member at a time fits: choose a smaller `batch_size`."
    return f"`{caller()}` ran out of memory with {num_members} members under `{plan}`: {first}\n{hint}"


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


def check_no_parts(arguments: Any) -> None:
    """Raises for groups among the arguments: members of parts of equal sizes would be mapped over in pairs."""
    is_node = lambda x: isinstance(x, _axes.AbstractParts) or _axes.is_per_member(x)
    if any(isinstance(node, _axes.AbstractParts) for node in jax.tree.leaves(arguments, is_leaf=is_node)):
        raise TypeError(
            f"`{caller()}` needs an `Ensemble`, whose members are of one architecture, got a group.\n"
            "Map over each part: `{name: map_members(fn)(part) for name, part in group.parts.items()}`."
        )
