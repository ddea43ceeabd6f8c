"""The identity of a call of `fleet.fit`: a short text for each of its members, functions, data and options."""

import hashlib
import inspect
import json
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .. import _axes
from .._warnings import warn
from ..checkpoint._snapshot import versions
from ..train._fit import fit
from ..train._run import Run
from ..train.resume._check import check_same_call
from ..train.resume._code_texts import code_text
from ..train.resume._texts import array_texts, digest_of, option_text
from ._make_members import is_maker
from ._settings import settings

# Options that are one number, or a list with one number per member.
_LIMITS = ("max_steps", "target")
# Settings of JAX that change random streams or dtypes, and those that change the last bits.
_SETTINGS = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_numpy_dtype_promotion")
_DEVICE = ("backend", "jax_default_matmul_precision")
# Options that affect time and memory, but not what is saved.
_IGNORED = ("plan", "scan", "checkpoint_every", "resume", "mesh")


class CallIdentity(NamedTuple):
    """The identity of a call.

    **Attributes:**

    - `texts`: the texts that identify the call, by name.
    - `code`: the names of the texts that can be compared under equal library versions only.
    - `conditions`: these versions, the kind of device and the precision of matrix products.
    """

    texts: dict[str, str]
    code: tuple[str, ...]
    conditions: dict[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the texts and conditions."""
        return hashlib.sha256(json.dumps([self.texts, self.conditions], sort_keys=True).encode()).hexdigest()


def call_identity(
    start: Any, ids: np.ndarray, functions: dict[str, Any], options: dict[str, Any], *, key: Any
) -> CallIdentity:
    """The identity of a call.

    **Arguments:**

    - `start`: the ensemble, state or run, or a function that makes an ensemble.
    - `functions`: the loss and the optimiser, by name.
    - `options`: the data and all options, by name.
    """
    texts = {"members": option_text(ids), "key": option_text(key)}
    code = {word: code_text(fn) for word, fn in functions.items()}
    if isinstance(start, Run):
        start = start.train_state, start.ensemble, start.selection
    if not is_maker(start) or jax.tree.leaves(eqx.filter(start, _axes.is_array)):
        texts["ensemble"] = digest_of(start)
    code["the members' code"] = code_text(eqx.filter(start, _axes.is_array, inverse=True))
    for word, value in options.items():
        if word in _IGNORED or value is None or _is_default(word, value):
            continue
        if word in _LIMITS:
            texts[word] = option_text(np.asarray(value))
        elif not _is_data(value):
            code[word] = code_text(value)
        elif jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
            texts[word] = option_text(value)
        else:
            arrays = jax.tree.map(lambda x: x if _axes.is_array(x) else np.asarray(x), value)
            texts |= array_texts(arrays, word)
    current = settings()
    texts |= {word: str(current[word]) for word in _SETTINGS}
    return CallIdentity(code | texts, tuple(code), _conditions(str(current["jax_default_matmul_precision"])))


def _conditions(precision: str) -> dict[str, str]:
    """What affects the last bits of results."""
    packages = {name: version for name, version in versions().items() if name not in ("python", "numpy")}
    packages["bytecode"] = str(sys.implementation.cache_tag)
    return packages | dict(zip(_DEVICE, (jax.default_backend(), precision), strict=True))


def check_same_identity(saved: CallIdentity, now: CallIdentity, folder: Any, *, name: str) -> None:
    """Raises if a folder was written by a different call; warns if it was written under other conditions."""
    before, after = saved.texts, now.texts
    differ = [word for word in now.conditions if saved.conditions.get(word) != now.conditions[word]]
    if differ:
        changes = ", ".join(f"{word} {saved.conditions.get(word)} -> {now.conditions[word]}" for word in differ)
        others = not set(differ) <= set(_DEVICE)
        warn(
            f"`{name}` resumes in `{folder}`, which was written under other conditions ({changes}): new shards may "
            f"differ from the saved ones in their last bits{', and functions cannot be compared' if others else ''}."
        )
        if others:
            code = {*saved.code, *now.code}
            before, after = ({word: x for word, x in texts.items() if word not in code} for texts in (before, after))
    check_same_call(before, after, folder, name=name)


def _is_default(word: str, value: Any) -> bool:
    """Whether an option has its default value in `fit`."""
    default = inspect.signature(fit).parameters[word].default
    plain = isinstance(value, bool | int | float | str) and isinstance(default, bool | int | float | str)
    return value is default or (plain and value == default)


def _is_data(value: Any) -> bool:
    """Whether a value consists of arrays, numbers and strings, without functions."""
    plain = lambda leaf: _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex | str | np.generic)
    return not callable(value) and all(map(plain, jax.tree.leaves(value)))
