import operator
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._errors import MemberMismatchError
from ._leaves import Size, describe, is_member_array, is_traced, path_text
from ._options import check_axis

_STACK = "If this is a list of models, make one stacked model of it first: `stack(models)`."


def array_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The array leaves of a tree with their paths in words."""
    return [(path_text(path), x) for path, x in jtu.tree_flatten_with_path(tree)[0] if is_member_array(x)]


def _sizes(tree: Any, axis: int, name: str) -> dict[Size, list[str]]:
    sizes: dict[int, list[str]] = {}
    for path, x in array_leaves(tree):
        if not -x.ndim <= axis < x.ndim:
            raise MemberMismatchError(
                f"`{name}` needs arrays with one value per member along axis {axis}; at `{path}`: got {describe(x)}.\n"
                + _STACK
            )
        sizes.setdefault(x.shape[axis], []).append(path)
    return sizes


def per_member_leaves(value: Any, *, axis: int, name: str) -> Size:
    """Every array leaf has the members axis, of one length, which is returned."""
    check_axis(axis, "axis", name=name)
    if name == "Each" and _holds_list_of_models(value, eqx.Module):
        raise TypeError(f"`Each` needs one PyTree whose arrays carry the members axis, got a list of models.\n{_STACK}")
    sizes = _sizes(value, axis, name)
    if not sizes:
        raise TypeError(
            f"`{name}` needs at least one array with a members axis, got {describe(value)}.\n"
            "Python numbers, functions and strings carry no axis: pass `jnp.asarray(values)`."
        )
    if len(sizes) > 1:
        listed = "\n".join(f"  {size} members at {_some(paths)}" for size, paths in sorted(sizes.items()))
        raise MemberMismatchError(
            f"`{name}` needs arrays that agree on the number of members along axis {axis}; got\n{listed}\n{_STACK}"
        )
    return next(iter(sizes))


def one_member_count(parts: dict[int, Any], arguments: Any, *, name: str) -> Size:
    """All parts that carry members have the same number of them."""
    if not parts:
        hint = "Mark inputs with one value per member: `Each(x)`."
        if _holds_list_of_models(arguments):
            hint = _STACK
        raise TypeError(f"`{name}` needs an argument with members, an `Ensemble` or an `Each`; got none.\n{hint}")
    counts = [per_member_leaves(part, axis=0, name=name) for part in parts.values()]
    if len(set(counts)) > 1:
        raise MemberMismatchError(
            f"`{name}` needs arguments that agree on the number of members; they have {', '.join(map(str, counts))}.\n"
            "An `Each` holds exactly one value per member; many examples for every member are a `Batch`."
        )
    return counts[0]


def has_axis(tree: Any, axis: int, argument: str, *, name: str) -> None:
    """Every array has this axis."""
    for path, x in array_leaves(tree):
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"`{name}` needs `{argument}` to be an axis of every array; at `{path or '<root>'}`: "
                f"got {axis} for shape {x.shape}."
            )


def batch_axis(value: Any, axis: Any) -> None:
    """An axis that every array has."""
    has_axis(value, check_axis(axis, "axis", name="Batch"), "axis", name="Batch")


def one_batch_size(values: Iterable[Any]) -> None:
    """All inputs marked as batches have the same number of examples."""
    sizes: set[int] = set()
    for value in values:
        sizes.update(_sizes(value, 0, "Batch"))
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no array"
        raise ValueError(f"`Batch` inputs of one call must have the same number of examples; got {found}.")


def ids(values: Any) -> None:
    """Member ids: integers in one dimension, at least one, each from 0 to 2**31 - 1, no two alike."""
    integer_ids(values)
    if is_traced(values):
        return
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"`ids` are integers of shape (members,), got {array.dtype} of shape {array.shape}.")
    if array.size == 0:
        raise ValueError("`ids` must name at least one member, got none.")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"`ids` lie in [0, 2**31), got {array.min()} to {array.max()}.")
    distinct_ids(array, "Give each member an id of its own.")


def integer_ids(values: Any) -> None:
    """Ids that no arithmetic has changed. Gradients and filtered trees have none.

    Asked at every use and not once: `jax.tree.map` makes Modules without any check.
    """
    if getattr(values, "ndim", 1) == 0:
        raise MemberMismatchError(
            f"`Ensemble` needs one id per member; at `.ids`: expected i32[members], got {describe(values)}.\n"
            "Inside `equinox.filter_vmap`, `jax.vmap` or `jax.lax.scan`, what is left of an ensemble is not a model. "
            "Write `map_members(fn)(ensemble, x)` or `ensemble.map(fn, x)`: there, `fn` gets the model of "
            "one member."
        )
    dtype = getattr(values, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            "`Ensemble` needs integer member ids, from which the members' random streams follow; at `.ids`: got "
            f"{describe(values)}.\n"
            "Arithmetic on all arrays of an ensemble changes its ids too: select the weights alone, with "
            "`eqx.partition(ensemble, eqx.is_inexact_array)` or `eqx.filter`. For a moving average of ensembles write "
            "`tree.polyak(old, new, tau)`."
        )


def distinct_ids(values: Any, fix: str) -> None:
    """Members of an ensemble have different ids."""
    if is_traced(values):
        return
    unique, counts = np.unique(np.asarray(values), return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            "Members need different ids, because each member's random stream follows from its id; repeated: "
            f"{unique[counts > 1].tolist()}.\n{fix}"
        )


def member_count(count: Any) -> int:
    """A count of at least one member."""
    return check_positive_int(count, "num_members", name="an ensemble")


def check_positive_int(value: Any, argument: str, *, name: str) -> int:
    """A count of at least one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`{name}` needs an integer `{argument}`, got {value!r}.")
    if number < 1:
        raise ValueError(f"`{name}` needs `{argument}` of at least 1, got {number}.")
    return number


MOST_STEPS = 2**31 - 1
"""Steps are counted in 32 bits inside compiled programs."""


def counter(value: Any, argument: str, *, name: str) -> int:
    """A count of at least one that compiled programs can reach."""
    number = check_positive_int(value, argument, name=name)
    if number > MOST_STEPS:
        raise ValueError(
            f"`{name}` needs `{argument}` of at most {MOST_STEPS}, because compiled programs count in 32 bits; "
            f"got {number}."
        )
    return number


def plan(value: Any, kind: type) -> None:
    """An execution plan, not its class; its name only for `"auto"`, which the caller has made a plan of."""
    if isinstance(value, kind):
        return
    hint = "For example `eqx_ensemble.plan.Vmap()`."
    if isinstance(value, type):
        hint = f"Pass an instance: `{value.__name__}(...)`."
    plans = '`"auto"`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`'
    raise TypeError(f"`plan` must be one of {plans}, got {value!r}.\n{hint}")


def _some(paths: list[str], most: int = 4) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _holds_list_of_models(arguments: Any, kinds: Any = (eqx.Module, list, tuple, dict)) -> bool:
    nodes = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, list))
    return any(isinstance(x, list) and len(x) > 1 and all(isinstance(item, kinds) for item in x) for x in nodes)
