from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax

from .._caller import caller
from .._check import MemberMismatchError, Size, array_leaves, check_axis
from .._leaf_text import leaf_text

_STACK = "For a list of models, stack it first: `stack(models)`."


def _sizes(tree: Any, axis: int) -> dict[Size, list[str]]:
    sizes: dict[int, list[str]] = {}
    for path, x in array_leaves(tree):
        if not -x.ndim <= axis < x.ndim:
            raise MemberMismatchError(
                f"`{caller()}` needs arrays with one value per member along axis {axis}; at `{path}`: got "
                f"{leaf_text(x)}.\n" + _STACK
            )
        sizes.setdefault(x.shape[axis], []).append(path)
    return sizes


def check_member_axis(value: Any, *, axis: int) -> Size:
    """Raises unless all array leaves agree on the length of the members axis. Returns it."""
    check_axis(axis, "axis")
    sizes = _sizes(value, axis)
    if not sizes:
        raise TypeError(
            f"`{caller()}` needs at least one array with a members axis, got {leaf_text(value)}.\n"
            "Python numbers, functions and strings carry no axis: pass `jnp.asarray(values)`."
        )
    if len(sizes) > 1:
        listed = "\n".join(f"  {size} members at {_some(paths)}" for size, paths in sorted(sizes.items()))
        raise MemberMismatchError(
            f"`{caller()}` needs arrays that agree on the number of members along axis {axis}; got\n{listed}\n{_STACK}"
        )
    return next(iter(sizes))


def check_no_models(value: Any) -> None:
    """Raises for a list of models, whose arrays may agree by chance on a first axis that is not one of members."""
    if _holds_list_of_models(value, ()):
        raise TypeError(f"`Each` needs one PyTree whose arrays carry the members axis, got a list of models.\n{_STACK}")


def check_member_count(parts: dict[int, Any], arguments: Any) -> Size:
    """Raises unless all arguments with members have the same number of them. Returns it."""
    if not parts:
        hint = "Mark inputs with one value per member: `Each(x)`; of a stacked Module, make one: `from_stacked(model)`."
        if _holds_list_of_models(arguments):
            hint = _STACK
        raise TypeError(f"`{caller()}` needs an argument with members, an `Ensemble` or an `Each`; got none.\n{hint}")
    counts = list(dict.fromkeys(check_member_axis(part, axis=0) for part in parts.values()))
    if len(counts) > 1:
        raise MemberMismatchError(
            f"`{caller()}` needs arguments with the same number of members, got {', '.join(map(str, counts[:-1]))} and "
            f"{counts[-1]}.\nAn `Each` holds one value per member. Mark a batch that all members share as `Batch`."
        )
    return counts[0]


def check_has_axis(tree: Any, axis: int, argument: str) -> None:
    """Raises unless every array has this axis."""
    for path, x in array_leaves(tree):
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"`{caller()}` needs `{argument}` to be an axis of every array; at `{path or '<root>'}`: "
                f"got {axis} for shape {x.shape}."
            )


def check_batch_size(values: Iterable[Any]) -> None:
    """Raises unless all inputs marked as batches have the same number of examples."""
    sizes: set[int] = set()
    for value in values:
        sizes.update(_sizes(value, 0))
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no array"
        raise ValueError(f"`Batch` inputs of one call must have the same number of examples; got {found}.")


def _some(paths: list[str], most: int = 4) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _holds_list_of_models(arguments: Any, kinds: Any = (list, tuple, dict)) -> bool:
    """Whether a list holds callable Modules only, or, if it has several items, also what else may be a model."""
    is_model = lambda x: isinstance(x, eqx.Module) and callable(x)
    nodes = jax.tree.leaves(arguments, is_leaf=lambda x: type(x) not in (tuple, dict))  # not the layers of a model
    lists = [x for x in nodes if isinstance(x, list) and x]
    return any(all(is_model(item) or (len(x) > 1 and isinstance(item, kinds)) for item in x) for x in lists)
