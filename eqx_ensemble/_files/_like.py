"""Checks of saving and loading ensembles."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._caller import caller
from .._check import MemberMismatchError, is_member_array, member_dtype
from .._ensemble import Ensemble
from ..checkpoint._engine import Manifest, is_array_like
from ..tree._engine import check_no_tracers


def is_maker(like: Any) -> bool:
    """Whether `like` is a function of a key; Modules and named tuples can be called too, but are trees."""
    return callable(like) and not isinstance(like, eqx.Module | tuple)


def evaluate_make(make: Any) -> Any:
    """The shapes of the result of `make`; the result itself if `make` cannot be traced or hides arrays."""
    check_make_of_key(make)
    key = jax.random.key(0)
    try:
        shapes = eqx.filter_eval_shape(make, key)
        check_no_tracers(shapes)
    except (jax.errors.JAXTypeError, MemberMismatchError):
        return make(key)
    return shapes


def as_like(like: Any, manifest: Manifest) -> Any:
    """A tree like the one that was saved, from a function that makes one member of it."""
    if not is_maker(like):
        return like
    one = evaluate_make(like)
    if manifest.members is None:
        return one
    if _is_saved_as(Ensemble, manifest, "<root>"):
        return _as_ensemble(one, manifest, "")
    if (
        isinstance(one, tuple)
        and len(one) == 2
        and isinstance(one[1], eqx.nn.State)
        and _is_saved_as(Ensemble, manifest, "[0]")
    ):
        state = jax.tree.map(lambda leaf: _with_axis(leaf, len(manifest.members or ())), one[1])
        return _as_ensemble(one[0], manifest, "[0]"), state
    return one


def _is_saved_as(kind: type, manifest: Manifest, path: str) -> bool:
    return manifest.structure.get(path) == kind.__name__


def _as_ensemble(one: Any, manifest: Manifest, start: str) -> Ensemble[Any]:
    """An ensemble of shapes, with the same shared leaves as the saved one."""
    saved = {entry.path: entry for entry in manifest.entries}
    keyed, treedef = jtu.tree_flatten_with_path(one)
    count = len(manifest.members or ())
    stacked, rest = [], []
    for keys, leaf in keyed:
        path = jtu.keystr(keys)
        own = saved.get(f"{start}.stacked{path}")
        if is_array_like(leaf) and f"{start}.shared{path}" not in saved:
            stacked.append(_with_axis(leaf, count))
            rest.append(None)
        elif type(leaf) is float and own is not None:  # floats of the members, marked by a shared number
            stacked.append(jax.ShapeDtypeStruct((count,), own.dtype))
            rest.append(leaf)
        else:
            stacked.append(None)
            rest.append(leaf)
    parts = (jtu.tree_unflatten(treedef, leaves) for leaves in (stacked, rest))
    return eqx.filter_eval_shape(Ensemble, *parts, jax.ShapeDtypeStruct((count,), jnp.int32))


def _with_axis(leaf: Any, count: int) -> jax.ShapeDtypeStruct:
    dtype = member_dtype(leaf) if is_member_array(leaf) else leaf.dtype
    return jax.ShapeDtypeStruct((count, *leaf.shape), dtype)


def check_make_of_key(make: Callable[..., Any]) -> None:
    """Checks that the function can be called with a key alone: the values of `zip` and `product` are in the file."""
    try:
        inspect.signature(make, follow_wrapped=False).bind(None)
    except ValueError:
        return
    except TypeError as error:
        raise TypeError(
            f"`{caller()}` calls the function that makes one member with a key alone, which it does not take: "
            f"{error}.\nGive what `build` got from `zip` or `product` any value: `lambda key: make(key, rate=0.0)`."
        ) from None


def check_member_selection(members: Any) -> None:
    """Checks that members are given as several positions."""
    if isinstance(members, int | np.integer):
        raise TypeError(
            f"`{caller()}` needs a list of positions as `members`, got {members}.\n"
            f"Write `load(path, like, members=[{members}])[0]` for one model."
        )


def check_like_given(like: Any) -> None:
    """Checks that `like` is given."""
    if like is None:
        raise TypeError(
            f"`{caller()}` needs `like`: the function that makes one member, an ensemble, or the shapes from "
            "`equinox.filter_eval_shape`.\nThe file holds the numbers; the model's code is yours."
        )
