"""Checks of saving, loading and exporting ensembles."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import check_path, check_sequence, check_word, is_member_array, kind_text, path_text
from ..checkpoint._check import safe_text


def run_of_fit_message(path: Any, folder: Any, *, name: str) -> str:
    """The message for a checkpoint of a run in place of a model."""
    return (
        f"`{name}` needs a checkpoint of an ensemble or a model, and `{path}` is one of a run of `fit`: it holds the "
        f"whole training state.\nThe same call of `fit` with `checkpoint={str(folder)!r}` gives the run; to load the "
        "ensemble without it, keep it with `save(path, run.ensemble)`."
    )


def check_has_arrays(tree: Any, *, name: str) -> None:
    """Checks that a tree is not a function without arrays, such as the one that makes the model."""
    leaves = jax.tree.leaves(tree)
    if callable(tree) and all(callable(leaf) and not is_member_array(leaf) for leaf in leaves):
        raise TypeError(
            f"`{name}` got {kind_text(tree)} without any array.\nPass the ensemble or the model, not its constructor."
        )


PLAIN_DTYPES = {"bool", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2"}
PLAIN_DTYPES |= {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}


def check_saved_members(members: Any, path: Any, *, name: str) -> None:
    """Checks that a checkpoint was saved with members."""
    if members is None:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`: it was saved without members.\n"
            "Members are those of an `Ensemble` or an `Each` in the tree that was saved."
        )


def check_one_ensemble(ensembles: Sequence[str], others: Sequence[str], path: Any, *, name: str) -> None:
    """Checks that a checkpoint holds at most one ensemble, and nothing with other members."""
    if len(ensembles) > 1:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`, which holds several ensembles: at "
            f"{', '.join(f'`{safe_text(where)}`' for where in ensembles)}.\nLoad all of it and index each ensemble, or "
            "save each at a path of its own."
        )
    if others:
        raise ValueError(
            f"`{name}` cannot choose members of `{path}`: what is marked at "
            f"{', '.join(f'`{safe_text(where)}`' for where in others)} was saved as a whole, because it has another "
            "number of members or holds them along another axis.\nLoad all of it, and take the members from each part."
        )


def check_member_selection(members: Any, *, name: str) -> None:
    """Checks that members are given as several positions."""
    if isinstance(members, int | np.integer):
        raise TypeError(
            f"`{name}` needs a list of positions as `members`, got {members}.\n"
            f"Write `load(path, like, members=[{members}])[0]` for one model."
        )


def check_like_given(like: Any, *, name: str) -> None:
    """Checks that `like` is given."""
    if like is None:
        raise TypeError(
            f"`{name}` needs `like`: the function that makes one member, an ensemble, or the shapes from "
            "`equinox.filter_eval_shape`.\nThe file holds the numbers; the model's code is yours."
        )


def check_member_format(format: Any, *, name: str) -> None:
    """Checks a format of exported members."""
    check_word(format, "format", ("eqx", "safetensors"), name=name)


def check_no_typed_keys(tree: Any, reason: str, *, name: str) -> None:
    """Checks that no leaf is an array of typed keys."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key):
            raise TypeError(
                f"`{name}` found typed keys at `{path_text(path)}`: {reason}.\nUse `save` and "
                "`load`, or keep `jax.random.key_data(key)` in the model."
            )


def check_plain_dtype(dtype: Any, path: str, *, name: str) -> None:
    """Checks that safetensors supports a dtype."""
    if dtype.name not in PLAIN_DTYPES:
        raise TypeError(
            f"`{name}` cannot write the array `{path}` of dtype {dtype.name}: safetensors has no such type.\n"
            "Cast it, or use `format='eqx'` or `save`."
        )


def check_paths(paths: Any, *, name: str) -> list:
    """Checks paths, at least one, and returns them as a list."""
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"`{name}` needs a list of paths, one per member, got the single path {str(paths)!r}.")
    listed = check_sequence(paths, "paths", name=name, of="paths, one per member")
    for path in listed:
        check_path(path, "paths", name=name)
    if not listed:
        raise ValueError(f"`{name}` needs at least one path, got none.")
    return listed
