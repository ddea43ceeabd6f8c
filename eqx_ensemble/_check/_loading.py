import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import MemberMismatchError
from ._files import plain
from ._leaves import describe, path_text
from ._options import check_path, check_sequence, check_word

PLAIN_DTYPES = {"bool", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2"}
PLAIN_DTYPES |= {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}


class Gap(tuple):
    """A leaf that differs: its path, what was saved, and what is expected."""

    __slots__ = ()

    def __new__(cls, path: str, saved: str, expected: str):
        """**Arguments:** the three texts."""
        return tuple.__new__(cls, (path, saved, expected))


def same_leaves(gaps: Sequence[Gap], path: Any, *, only_dtypes: bool, name: str) -> None:
    """No leaf of `like` differs from what was saved."""
    if not gaps:
        return
    verb = "differs" if len(gaps) == 1 else "differ"
    fix = "`like` is what was saved, in shape and dtype: make it as the model was made that was saved."
    if only_dtypes:
        fix = "Pass `cast='like'` to cast floats to floats and integers to integers, or give `like` the saved dtypes."
    elif any(where == ".ids" and expected == "nothing" for where, _, expected in gaps):
        fix = "An ensemble was saved, and `like` is none: pass the function that makes one member from a key."
    raise MemberMismatchError(
        f"`{name}` needs a `like` with the leaves saved in `{path}`; {len(gaps)} {verb}.\n{_listed(gaps)}\n{fix}"
    )


def structure_text(gaps: Sequence[Gap], path: Any, *, name: str) -> str:
    """How the static parts of `like` differ from those that were saved."""
    return (
        f"`{name}` found the leaves of `{path}` alike, but what is not an array differs from what was saved.\n"
        f"{_listed(gaps)}"
    )


def same_structure_as_saved(gaps: Sequence[Gap], path: Any, *, name: str) -> None:
    """What is not an array is in `like` as it was saved."""
    if gaps:
        raise MemberMismatchError(
            f"{structure_text(gaps, path, name=name)}\nMake `like` as the model was made that was saved, or pass "
            "`strict=False` to take these parts from `like` as they are."
        )


def _listed(gaps: Sequence[Gap]) -> str:
    lines = [f"  at `{where}`: saved {saved}, expected {expected}" for where, saved, expected in gaps]
    return plain("\n".join(lines))


def castable(saved: Any, expected: Any, path: str, *, fits: bool) -> None:
    """A cast keeps every number finite and in range."""
    if not fits:
        raise ValueError(
            f"The leaf saved at `{plain(path)}` as {saved} holds numbers outside {expected}: casting would change them "
            "into others.\nLoad it as it was saved, or rescale it first."
        )


def jax_dtype(dtype: Any, path: str) -> None:
    """A dtype that jax arrays can have now."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"The leaf at `{plain(path)}` is {dtype}, and jax has 64-bit types switched off.\nEnable them "
            "(`jax.config.update('jax_enable_x64', True)`), or pass `cast='like'` with a `like` of 32 bits."
        )


def has_members(members: Any, path: Any, *, name: str) -> None:
    """The checkpoint was saved with members that can be chosen among."""
    if members is None:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`: it was saved without any.\n"
            "Members are those of an `Ensemble` or an `Each` in the tree that was saved."
        )


def one_set_of_members(ensembles: Sequence[str], others: Sequence[str], path: Any, *, name: str) -> None:
    """One ensemble at most, and nothing that belongs to other members."""
    if len(ensembles) > 1:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`, which holds several ensembles: at "
            f"{', '.join(f'`{plain(where)}`' for where in ensembles)}.\nLoad all of it and index each ensemble, or "
            "save each at a path of its own."
        )
    if others:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`: what is marked at "
            f"{', '.join(f'`{plain(where)}`' for where in others)} was saved as a whole, because it has another number "
            "of members or holds them along another axis.\nLoad all of it, and take the members from each part."
        )


def member_selection(members: Any, *, name: str) -> None:
    """Several members, by their positions."""
    if isinstance(members, int | np.integer):
        raise TypeError(
            f"`{name}` needs a list of positions as `members`, got {members}.\n"
            f"Write `load(path, like, members=[{members}])[0]` for one model."
        )


def cast_option(cast: Any, *, name: str) -> None:
    """`None`, or `"like"`."""
    check_word(cast, "cast", (None, "like"), name=name)


def like_given(like: Any, *, name: str) -> None:
    """Something that says what is to be loaded."""
    if like is None:
        raise TypeError(
            f"`{name}` needs `like`: the function that makes one member, an ensemble, or the shapes from "
            "`equinox.filter_eval_shape`.\nThe file holds the numbers; the model's code is yours."
        )


def described(shape: Sequence[int], dtype: Any) -> str:
    """`f32[4,2]` for an array that was saved."""
    return describe(jax.ShapeDtypeStruct(tuple(shape), dtype))


def bytes_of(shape: Sequence[int], itemsize: int) -> int:
    """The size of an array, as a Python int, which does not wrap around."""
    return math.prod(shape) * itemsize


def file_format(format: Any, *, name: str) -> None:
    """A format that members are exported to."""
    check_word(format, "format", ("eqx", "safetensors"), name=name)


def no_typed_keys(tree: Any, reason: str, *, name: str) -> None:
    """No leaf is an array of typed keys."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key):
            raise TypeError(
                f"`{name}` found typed keys at `{path_text(path)}`: {reason}.\nUse `eqx_ensemble.save` and "
                "`eqx_ensemble.load`, or keep `jax.random.key_data(key)` in the model."
            )


def plain_dtype(dtype: Any, path: str, *, name: str) -> None:
    """A dtype that plain safetensors files have."""
    if dtype.name not in PLAIN_DTYPES:
        raise TypeError(
            f"`{name}` cannot write the array `{path}` of dtype {dtype.name}: safetensors has no such type.\n"
            "Cast it, or use `format='eqx'` or `eqx_ensemble.save`."
        )


def several_paths(paths: Any, *, name: str) -> list:
    """At least one path, and not one string."""
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"`{name}` needs a list of paths, one per member, got the single path {str(paths)!r}.")
    listed = check_sequence(paths, "paths", name=name, of="paths, one per member")
    for path in listed:
        check_path(path, "paths", name=name)
    if not listed:
        raise ValueError(f"`{name}` needs at least one path, got none.")
    return listed
