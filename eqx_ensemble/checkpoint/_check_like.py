"""Checks of `like` against the saved tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._check import MemberMismatchError, check_word
from .._leaf_text import leaf_text
from ._check import safe_text


def check_sharding(sharding: Any, shape: tuple[int, ...], path: str) -> None:
    """Checks that an array of this shape can have the sharding of `like`."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(f"The leaf at `{safe_text(path)}` cannot have the sharding of `like`: {error}") from None


class LeafDifference(NamedTuple):
    """A leaf that differs, as text: its path, and the saved and the expected leaf."""

    path: str
    saved: str
    expected: str


def check_same_leaves(differences: Sequence[LeafDifference], path: Any, *, only_dtypes: bool, name: str) -> None:
    """Checks that the leaves of `like` are those that were saved."""
    if not differences:
        return
    verb = "differs" if len(differences) == 1 else "differ"
    saved = {where for where, _, expected in differences if expected == "nothing"}
    wanted = {where for where, found, _ in differences if found == "nothing"}
    fix = "`like` has the shapes and dtypes of what was saved: make it as the saved model was made."
    if only_dtypes:
        fix = "Pass `cast='like'` to cast floats to floats and integers to integers, or give `like` the saved dtypes."
    elif {".ensemble.ids", ".stopped_at"} <= saved:
        fix = (
            "A `Run` was saved, and `like` is none: only a run of as many steps has its leaves. Save `run.ensemble` "
            "instead; `fit(checkpoint=...)` keeps a whole run."
        )
    elif ".ids" in saved:
        fix = "An ensemble was saved, and `like` is not one: pass the function that makes one member from a key."
    elif any(where.startswith(".stacked[1]") for where in wanted):
        fix = (
            "An ensemble without its `equinox.nn.State` was saved, and `like` makes both: pass an ensemble as `like`, "
            "or save the pair `(ensemble, state)`."
        )
    raise MemberMismatchError(
        f"`{name}` needs a `like` with the leaves saved in `{path}`; {len(differences)} {verb}.\n"
        f"{_differences_text(differences)}\n{fix}"
    )


def structure_text(differences: Sequence[LeafDifference], path: Any, *, name: str) -> str:
    """The differences between the static parts of `like` and those that were saved."""
    return (
        f"`{name}` found equal leaves in `{path}`, but parts that are not arrays differ from what was saved.\n"
        f"{_differences_text(differences)}"
    )


def check_same_structure(differences: Sequence[LeafDifference], path: Any, *, name: str) -> None:
    """Checks that the static parts of `like` are those that were saved."""
    if differences:
        raise MemberMismatchError(
            f"{structure_text(differences, path, name=name)}\nMake `like` as the saved model was made, or pass "
            "`strict=False` to take these parts from `like` as they are."
        )


def _differences_text(differences: Sequence[LeafDifference]) -> str:
    lines = [f"  at `{where}`: saved {saved}, expected {expected}" for where, saved, expected in differences]
    return safe_text("\n".join(lines))


def check_castable(saved: Any, expected: Any, path: str, *, fits: bool) -> None:
    """Checks that a cast keeps every number finite and in range."""
    if not fits:
        raise ValueError(
            f"The leaf saved at `{safe_text(path)}` as {saved} holds numbers outside {expected}: casting would change "
            "them into others.\nLoad it as it was saved, or rescale it first."
        )


def check_jax_dtype(dtype: Any, path: str) -> None:
    """Checks that JAX arrays can currently have a dtype."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"The leaf at `{safe_text(path)}` is {dtype}, and jax has 64-bit types switched off.\nEnable them "
            "(`jax.config.update('jax_enable_x64', True)`), or pass `cast='like'` with a `like` of 32 bits."
        )


def check_cast(cast: Any, *, name: str) -> None:
    """Checks `cast`: `None`, or `"like"`."""
    check_word(cast, "cast", (None, "like"), name=name)


def shape_text(shape: Sequence[int], dtype: Any) -> str:
    """`f32[4,2]` for an array that was saved."""
    return leaf_text(jax.ShapeDtypeStruct(tuple(shape), dtype))
