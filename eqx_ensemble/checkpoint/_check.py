"""Checks of the content to save, and messages for damaged files."""

import os
from typing import Any

import jax

from .._caller import caller
from .._check import (
    MOST_BITS,
    CheckpointCorruptError,
    MemberMismatchError,
    check_path,
    check_word,
    is_integer,
    is_member_array,
    is_traced,
    kind_text,
)

KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""The generators whose keys can be saved, and the number of words in a key."""
MOST_NESTED = 100
"""The maximum depth of metadata: deeper ones could exhaust the stack of a reader."""
_JSON = "Metadata are dicts with string keys, lists, strings, numbers, booleans and `None`."


def safe_text(text: Any) -> str:
    """Text from a file, made printable: characters that cannot be encoded are escaped."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def damage_message(file: Any, reason: str, *, leaf: str | None = None, member: int | None = None) -> str:
    """The message for a damaged file."""
    where = f"`{safe_text(file)}`"
    if leaf is not None:
        where += f", at `{safe_text(leaf)}`" + (f", member {member}" if member is not None else "")
    return (
        f"A checkpoint is damaged: {where}: {safe_text(reason)}.\n"
        "Load an older checkpoint or another copy: this checkpoint cannot be used."
    )


def format_version_message(file: Any, version: Any, known: int) -> str:
    """The message for a file in another version of the format."""
    return (
        f"`{safe_text(file)}` has version {safe_text(version)[:20]} of the checkpoint format, and this eqx_ensemble "
        f"reads version {known}.\nLoad it with the version of eqx_ensemble that wrote it, or a newer one."
    )


def check_not_traced(leaf: Any, path: str) -> None:
    """Checks that a leaf is not traced."""
    if is_traced(leaf):
        raise TypeError(
            f"A checkpoint holds numbers, and the leaf at `{path}` is traced: save outside `jax.jit` and other "
            "transformations."
        )


def check_savable_dtype(dtype: Any, path: str, *, known: bool) -> None:
    """Checks that the format supports a dtype."""
    if not known:
        raise TypeError(f"The leaf at `{path}` is of dtype {dtype}, which cannot be saved: cast it to a dtype of jax.")


def check_saved_rows(shape: tuple[int, ...], num_members: int | None, path: str) -> None:
    """Checks that a leaf marked as one value per member has one for each."""
    if num_members is None or shape[:1] != (num_members,):
        raise MemberMismatchError(
            f"The leaf at `{path}` is marked as one value per member: expected ({num_members}, ...), got {shape}.\n"
            "`ids` has one id for each member, and `per_member` marks the leaves with the leading axis."
        )


def check_json(value: Any, path: str = "meta", depth: int = MOST_NESTED) -> None:
    """Checks that JSON returns a value unchanged, except for tuples, and that readers accept its depth."""
    if depth < 0:
        raise ValueError(f"`{path}` is nested more than {MOST_NESTED} times, which readers reject.")
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"`{path}` has the key {key!r}, which JSON would make a string.\n{_JSON}")
            if key == "<float>":
                raise ValueError(f"`{path}` has the key '<float>', under which numbers like NaN are kept: rename it.")
            check_json(item, f"{path}[{key!r}]", depth - 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{path}[{i}]", depth - 1)
    elif not (value is None or type(value) in (str, int, float, bool)):
        array = is_member_array(value) or isinstance(value, jax.Array)
        hint = " Write `array.tolist()` for its numbers." if array else ""
        raise TypeError(f"`{path}` cannot be written as JSON: it is {kind_text(value)}.\n{_JSON}{hint}")
    elif type(value) is int and value.bit_length() > MOST_BITS:
        raise ValueError(
            f"`{path}` is a number of {value.bit_length()} bits, which readers reject.\nWrite `hex(value)`."
        )


def check_manifest_size(size: int, limit: int, path: Any) -> None:
    """Checks that a reader accepts the size of a manifest."""
    if size > limit:
        raise ValueError(
            f"The description of the checkpoint `{path}` takes {size} bytes, and a reader takes at most {limit}.\n"
            "Keep `meta` short, and stack small arrays into larger ones."
        )


def check_numbers(last: Any, best: Any, keep_period: Any, every: Any) -> None:
    """Checks how many checkpoints are kept, and how often they are written."""
    given = {"last": last, "best": best, "keep_period": keep_period, "every": every}
    for argument, value in given.items():
        least = 0 if argument == "best" else 1
        if value is None and argument in ("keep_period", "every"):
            continue
        if not is_integer(value):
            raise TypeError(f"`checkpoint.Checkpoints` needs an integer `{argument}`, got {value!r}.")
        if value < least:
            raise ValueError(f"`checkpoint.Checkpoints` needs `{argument}` of at least {least}, got {value}.")


_STORES = ("gs", "s3")
_NOT_IN_ORBAX = {"uint2", "uint4", "float8_e4m3"}


def check_format(format: Any, path: Any) -> None:
    """Checks a format, and that it can be written at a path."""
    check_path(path, "path")
    check_word(format, "format", ("safetensors", "orbax"))
    if format == "safetensors" and "://" in os.fspath(path):
        raise ValueError(
            f"`{caller()}` writes safetensors to disks only, and `{path}` is in an object store.\nPass "
            "`format='orbax'`."
        )


def check_object_store(path: str) -> None:
    """Checks that Orbax supports an object store: any other would become a local folder with that name."""
    if path.partition("://")[0] not in _STORES:
        known = " or ".join(f"`{store}://`" for store in _STORES)
        raise ValueError(f"`{path}` is in an object store that is not supported.\nThe path starts with {known}.")


def check_orbax_dtype(dtype: Any, path: str) -> None:
    """Checks that Orbax supports a dtype."""
    if dtype.name in _NOT_IN_ORBAX:
        raise TypeError(
            f"The leaf at `{path}` is of dtype {dtype.name}, which Orbax cannot save.\n"
            "Cast it, or use `format='safetensors'`."
        )


def check_same_in_processes(path: str, *, same: bool) -> None:
    """Checks that a leaf is the same in all processes that hold it."""
    if not same:
        raise ValueError(
            f"The leaf at `{path}` is not the same in all processes, and only one of them can be saved.\n"
            "Make it equal, or an array that is sharded over the processes, as "
            "`jax.make_array_from_process_local_data` does."
        )


def corrupt_error(
    file: Any, reason: str, *, leaf: str | None = None, member: int | None = None
) -> CheckpointCorruptError:
    """The error for a damaged file; the caller raises it."""
    message = damage_message(file, reason, leaf=leaf, member=member)
    return CheckpointCorruptError(message, str(file), leaf, member)
