import functools as ft
import importlib.metadata
import math
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._check import is_member_array
from ..distributed import to_host
from ._check import check_json, check_savable_dtype, check_saved_rows
from ._dtypes import Numbers, host_numbers
from ._manifest import Entry, Manifest, Number
from ._structure import is_array_like, is_number, saved_leaves, structure

_PACKAGES = ("eqx_ensemble", "jax", "jaxlib", "equinox", "optax", "numpy")


class Snapshot(NamedTuple):
    """The content to write: the manifest, still without file name and checksums, and the arrays by tensor."""

    manifest: Manifest
    arrays: dict[str, Any]


def snapshot(
    tree: Any,
    *,
    per_member: Any = False,
    ids: Any = None,
    meta: Any = None,
    step: int | None = None,
    score: Any = None,
    copy: bool = False,
    take: Callable[..., Numbers] = host_numbers,
) -> Snapshot:
    """The content of a checkpoint, in host memory or on the devices that `take` leaves it on.

    **Arguments:**

    - `tree`: any PyTree. Arrays (also typed keys) and Python numbers are saved.
    - `per_member`: a bool, or a PyTree of bools that is a prefix of `tree`: whether leaves carry the leading `members`
        axis.
    - `ids`: the members' ids.
    - `meta`: metadata that JSON can represent.
    - `copy`: copy the arrays, for a writer in another thread; without it, arrays on the CPU are not copied.
    - `take`: the function that returns the numbers of an array leaf.
    """
    check_json(meta)
    members = None if ids is None else tuple(int(i) for i in to_host(ids))
    flags = jax.tree.leaves(jax.tree.broadcast(per_member, tree))
    entries, numbers, arrays, firsts = [], [], {}, {}
    for (path, leaf), flag in zip(saved_leaves(tree), flags, strict=True):
        if is_number(leaf):
            numbers.append(Number(path, leaf))
        elif is_member_array(leaf):
            first = firsts.get((id(leaf), bool(flag)))
            if first is not None:  # an array that occurs twice is saved once
                entries.append(first._replace(path=path))
                continue
            data, key = take(leaf, path, copy=copy)
            if flag:
                check_saved_rows(data.shape, None if members is None else len(members), path)
            arrays[path] = data
            entry = Entry(path, path, "members" if flag else "shared", data.dtype.name, data.shape, key)
            firsts[id(leaf), bool(flag)] = entry
            entries.append(entry)
        elif is_array_like(leaf):
            check_savable_dtype("shapes only", path, known=False)
    manifest = Manifest(
        "", members, tuple(entries), tuple(numbers), structure(tree), meta, step, _score(score), versions()
    )
    return Snapshot(manifest, arrays)


def _score(score: Any) -> float | None:
    if score is None:
        return None
    return None if math.isnan(value := float(score)) else value


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that affect results."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


@ft.cache  # looking one up takes longer than writing a small checkpoint
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
