"""Short texts of values and programs, the same in every process."""

import hashlib
import re
from typing import Any

import jax
import numpy as np

from ... import _axes
from ..._check import is_typed_key
from ..._pytree import PyTree
from ...checkpoint._check_like import shape_text
from ...distributed import to_host

_ADDRESS = re.compile(r"(?: at )?0x[0-9a-f]+")
SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")
_SHOWN = 8


def option_text(option: Any) -> str:
    """A text for a number, a string, a key, or one number per member, regardless of the type of a number."""
    if option is None or isinstance(option, str):
        return repr(option)
    if is_typed_key(option):
        option = jax.random.key_data(option)
    values = np.asarray(to_host(option))
    if values.size > _SHOWN:
        return array_text(values)
    return repr(values.tolist())


def without_addresses(text: str) -> str:
    """A text of objects without their addresses in memory, which differ between processes."""
    return _ADDRESS.sub("", text)


def array_texts(tree: PyTree, name: str) -> dict[str, str]:
    """A text for every array of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": array_text(x) for path, x in keyed}


def array_text(x: Any) -> str:
    """An array's shape, dtype, first values and digest."""
    x = to_host(x)
    first = "" if is_typed_key(x) else ", ".join(map(str, np.ravel(x[:_SHOWN] if x.ndim else x)[:_SHOWN]))
    more = ", ..." if x.size > _SHOWN else ""
    return f"{shape_text(x.shape, x.dtype)} [{first}{more}], {digest_of(x)}"


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex | np.generic):
            add_array(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


def add_array(digest: Any, path: str, leaf: Any) -> None:
    """Adds an array or a number to a digest."""
    if is_typed_key(leaf):
        path, leaf = f"{path} {jax.random.key_impl(leaf)}", jax.random.key_data(leaf)
    array = np.ascontiguousarray(to_host(leaf))
    digest.update(f"{path} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
