import errno
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._errors import CheckpointCorruptError, MemberMismatchError
from ._leaves import MOST_BITS, is_member_array, is_traced, kind_text

KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""The generators whose keys can be saved, and how many words a key of theirs has."""

_JSON = "Metadata are dicts with string keys, lists, strings, numbers, booleans and `None`."


def plain(text: Any) -> str:
    """A text from a file as it may be printed: whatever could not be encoded is escaped."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def corrupt(file: Any, reason: str, *, leaf: str | None = None, member: int | None = None) -> CheckpointCorruptError:
    """The error for a damaged file."""
    place = f"`{plain(file)}`"
    if leaf is not None:
        place += f", at `{plain(leaf)}`" + (f", member {member}" if member is not None else "")
    return CheckpointCorruptError(
        f"A checkpoint is damaged: {place}: {plain(reason)}.\n"
        "Load an older checkpoint or another copy: what is left of this one cannot be told from what was saved.",
        plain(file),
        leaf,
        member,
    )


def something_to_save(tree: Any, *, name: str) -> None:
    """Not a mere function, such as the one that makes the model: it would replace a checkpoint with nothing."""
    leaves = jax.tree.leaves(tree)
    if callable(tree) and all(callable(leaf) and not is_member_array(leaf) for leaf in leaves):
        raise TypeError(
            f"`{name}` got {kind_text(tree)} without any array.\nPass the ensemble or the model, not what makes it."
        )


def other_format(file: Any, version: Any, known: int) -> ValueError:
    """The error for a file in a format that this version of the library does not know."""
    return ValueError(
        f"`{plain(file)}` has version {plain(version)[:20]} of the checkpoint format, and this eqx_ensemble reads "
        f"version {known}.\nLoad it with the version of eqx_ensemble that wrote it, or a newer one."
    )


def not_traced(leaf: Any, path: str) -> None:
    """A leaf whose numbers are at hand."""
    if is_traced(leaf):
        raise TypeError(
            f"A checkpoint holds numbers, and the leaf at `{path}` is traced: save outside `jax.jit` and other "
            "transformations."
        )


def savable(leaf: Any, path: str) -> None:
    """A leaf whose numbers this process has all at hand."""
    not_traced(leaf, path)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise NotImplementedError(
            f"The leaf at `{path}` is spread over several processes, and this one sees a part of it only.\nPass "
            "`format='orbax'`, or gather it first: `eqx_ensemble.distributed.to_host(tree)`."
        )


def savable_dtype(dtype: Any, path: str, *, known: bool) -> None:
    """A dtype that the format has a place for."""
    if not known:
        raise TypeError(f"The leaf at `{path}` is of dtype {dtype}, which cannot be saved: cast it to a dtype of jax.")


def known_key(kind: str, path: str) -> None:
    """A generator whose keys jax can make again from their data."""
    if kind not in KEY_WORDS:
        raise TypeError(
            f"The keys at `{path}` are of the generator {kind!r}, which cannot be saved: use one of "
            f"{', '.join(KEY_WORDS)}."
        )


def saved_rows(shape: tuple[int, ...], num_members: int | None, path: str) -> None:
    """A leaf said to have one value per member has as many as there are members."""
    if num_members is None or shape[:1] != (num_members,):
        raise MemberMismatchError(
            f"The leaf at `{path}` is marked as one value per member: expected ({num_members}, ...), got {shape}.\n"
            "`ids` has one id for each member, and `per_member` marks the leaves with the leading axis."
        )


def json_value(value: Any, path: str = "meta") -> None:
    """A value that JSON gives back as it was, tuples aside."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"`{path}` has the key {key!r}, which JSON would make a string.\n{_JSON}")
            if key == "<float>":
                raise ValueError(f"`{path}` has the key '<float>', under which numbers like NaN are kept: rename it.")
            json_value(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            json_value(item, f"{path}[{i}]")
    elif not (value is None or type(value) in (str, int, float, bool)):
        array = is_member_array(value) or isinstance(value, jax.Array)
        hint = " Write `array.tolist()` for its numbers." if array else ""
        raise TypeError(f"`{path}` cannot be written as JSON: it is {kind_text(value)}.\n{_JSON}{hint}")
    elif type(value) is int and value.bit_length() > MOST_BITS:
        raise ValueError(
            f"`{path}` is a number of {value.bit_length()} bits, which no reader takes.\nWrite `hex(value)`."
        )


def manifest_size(size: int, limit: int, path: Any) -> None:
    """The manifest is one that a reader accepts."""
    if size > limit:
        raise ValueError(
            f"The description of the checkpoint `{path}` takes {size} bytes, and a reader takes at most {limit}.\n"
            "Keep `meta` short, and stack small arrays into larger ones."
        )


def step_number(step: Any) -> None:
    """A step that can number a checkpoint."""
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"`Checkpoints` needs an integer `step`, got {step!r}.\nWrite `int(step)` for an array.")
    if not 0 <= step < 10**12:
        raise ValueError(f"`Checkpoints` needs `step` from 0 to 10**12 - 1, got {step}.")


def retention(last: Any, best: Any, keep_period: Any) -> None:
    """How many checkpoints to keep."""
    for argument, value, least in (("last", last, 1), ("best", best, 0), ("keep_period", keep_period, 1)):
        if value is None and argument == "keep_period":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"`Checkpoints` needs an integer `{argument}`, got {value!r}.")
        if value < least:
            raise ValueError(f"`Checkpoints` needs `{argument}` of at least {least}, got {value}.")


def no_step(folder: Any, step: int | None, steps: Sequence[int]) -> None:
    """The checkpoint asked for is there."""
    if step is None and not steps:
        raise FileNotFoundError(errno.ENOENT, f"`Checkpoints.restore` found no checkpoint in `{folder}`")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(
            errno.ENOENT, f"`Checkpoints.restore` found no checkpoint of step {step} in `{folder}`; there are: {there}"
        )


def fell_back(bad: Sequence[tuple[int, Exception]], step: int) -> str:
    """What to say when the newest checkpoints are damaged."""
    damaged = "\n".join(f"  step {number}: {str(error).splitlines()[0]}" for number, error in bad)
    return f"`Checkpoints.restore` went back to step {step}, because what is newer is damaged.\n{damaged}"


def all_damaged(bad: Sequence[tuple[int, Exception]], folder: Any) -> CheckpointCorruptError:
    """The error when no checkpoint can be read."""
    damaged = "\n".join(f"  step {number}: {str(error).splitlines()[0]}" for number, error in bad)
    first = bad[0][1]
    file, leaf = getattr(first, "file", str(folder)), getattr(first, "leaf", None)
    return CheckpointCorruptError(f"All checkpoints in `{folder}` are damaged.\n{damaged}", file, leaf)
