import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import hashlib
import pathlib
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._caller import caller
from .._check import MemberMismatchError, check_word, is_key, is_member_array, is_traced, number_text, path_text
from .._ids import Ids, has_ids
from .._leaf_text import leaf_text
from ._check import safe_text
from ._manifest import TABLE

# Checks of `like` against the saved tree.


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


def check_same_leaves(differences: Sequence[LeafDifference], path: Any, *, only_dtypes: bool) -> None:
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
        f"`{caller()}` needs a `like` with the leaves saved in `{path}`; {len(differences)} {verb}.\n"
        f"{_differences_text(differences)}\n{fix}"
    )


def structure_text(differences: Sequence[LeafDifference], path: Any) -> str:
    """The differences between the static parts of `like` and those that were saved."""
    return (
        f"`{caller()}` found equal leaves in `{path}`, but parts that are not arrays differ from what was saved.\n"
        f"{_differences_text(differences)}"
    )


def check_same_structure(differences: Sequence[LeafDifference], path: Any) -> None:
    """Checks that the static parts of `like` are those that were saved."""
    if differences:
        raise MemberMismatchError(
            f"{structure_text(differences, path)}\nMake `like` as the saved model was made, or pass "
            "`strict=False` to take these parts from `like` as they are."
        )


def _differences_text(differences: Sequence[LeafDifference]) -> str:
    lines = [f"  at `{where}`: saved {saved}, expected {expected}" for where, saved, expected in differences]
    return safe_text("\n".join(lines))


def check_cast(cast: Any) -> None:
    """Checks `cast`: `None`, or `"like"`."""
    check_word(cast, "cast", (None, "like"))


def shape_text(shape: Sequence[int], dtype: Any) -> str:
    """`f32[4,2]` for an array that was saved."""
    return leaf_text(jax.ShapeDtypeStruct(tuple(shape), dtype))


_LONGEST = 200
_DEEPEST = 20
_SAY_THEMSELVES = (
    str, bytes, range, slice, fractions.Fraction, decimal.Decimal, pathlib.PurePath, uuid.UUID, datetime.date,
    datetime.time, datetime.timedelta, datetime.tzinfo, types.EllipsisType, types.NoneType,
)  # fmt: skip


def static_text(value: Any) -> str:
    """A static value as readable text: equal for equal values, across processes and versions.

    Numbers, strings, enumerations, containers, dataclasses, partial functions and arrays are described by their
    contents, functions by their name and other objects by their type, so that two lambdas have the same text. Long
    texts are cut, and end with a digest of the complete text.
    """
    return _text(value, 0)


def _text(value: Any, depth: int) -> str:
    text = _long_text(value, depth)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _long_text(value: Any, depth: int) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}" if value.name else f"{type(value).__name__}({value.value!r})"
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (bool, int, float, complex):
        return number_text(value)
    if isinstance(value, _SAY_THEMSELVES):
        return repr(value)
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name if isinstance(value, np.dtype) else value.__name__
    if isinstance(value, np.ndarray | jax.Array):
        return _array_text(value)
    name = getattr(value, "__name__", None)  # functions, also those that JAX has wrapped
    if isinstance(name, str):
        return name
    if depth == _DEEPEST:  # of a container that holds itself
        return type(value).__name__
    return _parts_text(value, lambda part: _text(part, depth + 1))


def _parts_text(value: Any, text: Any) -> str:
    """A container by its contents; an object of any other kind by its type."""
    kind = type(value).__name__
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return _call(kind, [], dict(zip(names, value, strict=True)), text)
    if isinstance(value, tuple | list):
        inside = ", ".join(map(text, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{text(key)}: {text(item)}" for key, item in value.items())) + "}"
    if isinstance(value, Set):
        return f"{kind}({', '.join(sorted(map(text, value)))})"
    if isinstance(value, ft.partial):
        return _call(kind, [value.func, *value.args], value.keywords, text)
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return _call(kind, [], {name: getattr(value, name, None) for name in fields}, text)
    return kind


def _call(kind: str, args: list, keywords: Mapping[str, Any], text: Any) -> str:
    return f"{kind}({', '.join([*map(text, args), *(f'{name}={text(x)}' for name, x in keywords.items())])})"


def _array_text(x: Any) -> str:
    if isinstance(x, np.ndarray) and x.dtype.kind in "USO":
        return repr(x.tolist()) if x.dtype.kind != "O" else f"object array {x.shape}"
    if isinstance(x, jax.Array) and (is_traced(x) or not x.is_fully_addressable):
        return leaf_text(x)
    data = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    digest = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]
    return f"{x.dtype}{list(x.shape)} sha256:{digest}"


STATIC = ": "
"""The separator between the path of a node and the name of one of its static fields."""


def saved_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree in order, with distinct paths."""
    taken = {TABLE: 0}
    leaves = []
    for keys, leaf in jtu.tree_flatten_with_path(tree)[0]:
        path = path_text(keys)
        number = taken[path] = taken.get(path, -1) + 1  # a custom node may give two children the same name
        leaves.append((path if number == 0 else f"{path}#{number}", leaf))
    return leaves


def is_array_like(leaf: Any) -> bool:
    """Whether a leaf is an array or the shape of one."""
    return is_member_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is saved as a Python number."""
    return type(leaf) in (bool, int, float, complex)


def structure(tree: Any) -> dict[str, str]:
    """Everything in a tree except its arrays and numbers, as readable text by path.

    These are the types of nodes with their static fields, and leaves that are neither arrays nor numbers, each as
    [`static_text`][eqx_ensemble.checkpoint._static_text.static_text].
    """
    return dict(_visit((), tree))


def _visit(path: tuple, node: Any) -> Iterator[tuple[str, str]]:
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and keyed[0][0] == ():
        if not (is_array_like(node) or is_number(node)):
            yield path_text(path), static_text(node)
        return
    where = path_text(path)
    yield where, "None" if node is None else type(node).__name__
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if field.metadata.get("static", False):
                yield f"{where}{STATIC}{field.name}", static_text(getattr(node, field.name, None))
    for keys, child in keyed:
        if not (isinstance(child, Ids) or (child is None and has_ids(node))):  # a file holds ids as arrays
            yield from _visit(path + keys, child)


def unlike(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The paths at which two structures differ.

    Static fields that only one of them has are ignored, because versions of a class differ by them.
    """
    paths = [*saved, *(path for path in expected if path not in saved)]
    differ = [path for path in paths if saved.get(path) != expected.get(path)]
    return [path for path in differ if (path in saved and path in expected) or STATIC not in path]
