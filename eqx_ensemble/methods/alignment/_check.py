from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..._caller import caller
from ..._check import check_function, check_integer, check_sequence, concrete, is_member_array, kind_text
from ..._ensemble import Ensemble
from ..._leaf_text import leaf_text

_EXAMPLE = "lambda model: model.layers[0]"


def check_entries(entries: Any, argument: str) -> tuple[Any, ...]:
    """Raises unless `entries` are functions or pairs of a function and an axis; `outputs` must not be empty."""
    found = check_sequence(entries, argument, of="functions that select layers")
    if not found and argument == "outputs":
        fix = f"`outputs` lists the layers that output the units. For example `{_EXAMPLE}`."
        raise ValueError(f"`{caller()}` needs at least one layer in `outputs`.\n{fix}")
    for i, entry in enumerate(found):
        path = f"{argument}[{i}]"
        where, *axis = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry,)
        check_function(where, path, example=_EXAMPLE)
        if axis and (isinstance(axis[0], bool) or not isinstance(axis[0], int)):
            raise TypeError(f"`{caller()}` needs `{path}` to be `(where, axis)` with an integer axis, got {axis[0]!r}.")
    return tuple(found)


def check_heads(qk: Any, vo: Any, kind: type) -> None:
    """Raises unless both arguments are `Units`."""
    for argument, value in (("qk", qk), ("vo", vo)):
        if not isinstance(value, kind):
            raise TypeError(f"`{caller()}` needs `{argument}` to be `Units`, got {kind_text(value)}.")


def check_model(model: Any) -> Any:
    """Raises unless `model` is a model or an ensemble. Returns one model."""
    if isinstance(model, Ensemble):
        return model[0]
    if not isinstance(model, eqx.Module):
        raise TypeError(f"`{caller()}` needs a model or an ensemble, got {kind_text(model)}.")
    return model


def check_reference(value: Any, num_members: int) -> int:
    """Raises unless `value` is the position of a member. Returns it as a non-negative integer."""
    position = check_integer(value, "reference", least=-num_members)
    if position >= num_members:
        raise ValueError(f"`{caller()}` needs `reference` to be the position of one of the members, got {position}.")
    return position % num_members


def check_units(units: Any, kinds: tuple[type, ...], *, found: bool) -> list[Any]:
    """Raises unless `units` is a list of at least one `Units` or `Heads`. Returns it."""
    listed = check_sequence(units, "units", of="`Units` and `Heads`")
    for i, each in enumerate(listed):
        if not isinstance(each, kinds):
            raise TypeError(f"`{caller()}` needs a list of `Units` and `Heads`, got {kind_text(each)} at `units[{i}]`.")
    if not listed:
        what = "found no units between layers of known types" if found else "needs at least one group in `units`"
        raise ValueError(
            f"`{caller()}` {what}.\nSay which axes share an order: `units=[methods.alignment.Units(...)]`."
        )
    return listed


def check_where(where: Callable[[Any], Any], model: Any, path: str) -> Any:
    """Raises if a function fails to select a node of a model. Returns the node."""
    try:
        return where(model)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{caller()}` needs functions that select parts of a member, as in `equinox.tree_at`; `{path}` raised "
            f"{type(error).__name__}.\nFor example `{_EXAMPLE}`."
        ) from error


def check_some_axes(found: list[Any] | None, layer: Any, path: str, argument: str) -> list[Any]:
    """Raises for a layer of unknown type. Returns the axes."""
    if found is None:
        role = "output" if argument == "outputs" else "input"
        raise TypeError(
            f"`{caller()}` cannot infer the {role} axes of {kind_text(layer)}, at `{path}`.\n"
            "Select its arrays, each with its axis: `(lambda model: model.layer.weight, 0)`."
        )
    return found


def check_axis_of(leaf: Any, axis: int, path: str, kind: type) -> Any:
    """Raises unless `leaf` is an array that has this axis. Returns it."""
    if not isinstance(leaf, kind):
        raise TypeError(f"`{caller()}` needs `{path}` to select an array of a member, got {kind_text(leaf)}.")
    ndim = len(leaf.shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"`{caller()}` needs `{path}` to name an axis of an array of shape {leaf.shape}, got {axis}.")
    return leaf


def check_divisible(length: int, size: int, text: str) -> None:
    """Raises unless the length of an axis is a multiple of the number of units."""
    if length % size:
        raise ValueError(
            f"`{caller()}` needs axes that hold a whole number of entries for each unit; {text}.\n"
            "Do these layers share the units? Name another one in `outputs` or `inputs`."
        )


def check_conv_groups(layer: Any, argument: str) -> None:
    """Raises for a convolution whose channels cannot be permuted freely."""
    groups = getattr(layer, "groups", 1)
    depthwise = groups == getattr(layer, "in_channels", None) == getattr(layer, "out_channels", None)
    if groups > 1 and not (depthwise and argument == "outputs"):
        fix = "Name a depthwise convolution among `outputs` alone." if depthwise else "Leave these units out."
        raise ValueError(f"`{caller()}` cannot permute channels of a convolution in {groups} groups.\n{fix}")


def check_norm_groups(layer: Any) -> None:
    """Raises for a `GroupNorm` in groups of some of the units."""
    if isinstance(layer, eqx.nn.GroupNorm) and layer.groups not in (1, layer.channels):
        raise ValueError(
            f"`{caller()}` cannot permute units across the {layer.groups} groups of `GroupNorm`.\n"
            "Leave these units out."
        )


def check_member_arrays(stacked: Any, path: str) -> np.ndarray:
    """Raises unless `stacked` is a concrete floating-point array with members. Returns it in double precision."""
    if not is_member_array(stacked):
        raise ValueError(
            f"`{caller()}` permutes each member's own arrays; the one at `{path}` is shared by all members.\n"
            "Leave these units out."
        )
    host = concrete(stacked)
    if host is None:
        raise TypeError(f"`{caller()}` needs concrete arrays of one process; at `{path}`: got {leaf_text(stacked)}.")
    if not jnp.issubdtype(host.dtype, jnp.inexact):
        raise TypeError(f"`{caller()}` compares floating-point arrays; at `{path}`: got {leaf_text(stacked)}.")
    return host.astype(np.complex128 if np.iscomplexobj(host) else np.float64)


def check_predictions(out: Any) -> list[np.ndarray]:
    """Raises unless predictions are finite floating-point numbers for at least one row. Returns their arrays."""
    found = [np.asarray(x) for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not sum(x.size for x in found) or not all(np.isfinite(x).all() for x in found):
        raise ValueError(
            f"`{caller()}` compares predictions for `x`, and needs finite floating-point ones of at least one row.\n"
            "Pass a few rows of the data, and `state` after training."
        )
    return found
