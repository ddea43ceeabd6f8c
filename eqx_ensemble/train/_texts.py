"""Short texts of arrays, options and traced programs, the same in every process. They identify a call that is saved."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._caller import caller
from .._check import is_key
from .._pytree import PyTree
from .._warnings import warn
from ..distributed import to_host

_SHOWN = 8
# Addresses in memory, and the names of functions that were sent to a worker by value, which lose them.
_VARYING = re.compile(r"(?: at )?0x[0-9a-f]+|name=\S+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")


def option_text(option: Any) -> str:
    """A text for a number, a string, a key, or one number per member, regardless of the type of a number."""
    if option is None or isinstance(option, str):
        return repr(option)
    values = np.asarray(to_host(jax.random.key_data(option) if is_key(option) else option))
    return array_text(values) if values.size > _SHOWN else repr(values.tolist())


def array_text(x: Any) -> str:
    """An array's dtype, shape, first values and digest."""
    x = np.asarray(to_host(x))
    first = ", ".join(map(str, x.reshape(-1)[:_SHOWN])) + ", ..." * (x.size > _SHOWN)
    return f"{x.dtype}[{','.join(map(str, x.shape))}] [{first}], {digest_of(x)}"


def array_texts(tree: PyTree, root: str) -> dict[str, str]:
    """A text for every array of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{root}{jax.tree_util.keystr(path)}": array_text(x) for path, x in keyed}


def shapes_text(tree: PyTree) -> str:
    """The shapes of the arrays of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    text = lambda path, x: f"{jax.tree_util.keystr(path)} {x.dtype}[{','.join(map(str, x.shape))}]".strip()
    return ", ".join(text(path, x) for path, x in keyed)


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if eqx.is_array(x) or isinstance(x, bool | int | float | complex | np.generic):
            kind = jax.random.key_impl(x) if is_key(x) else ""  # pyright: ignore[reportArgumentType]
            x = np.ascontiguousarray(to_host(x))
            digest.update(f"{jax.tree_util.keystr(path)} {kind} {x.dtype} {x.shape}".encode())
            digest.update(x.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def program_text(jaxpr: Any, constant_out: PyTree = None) -> str:
    """A digest of a traced program with its constants."""
    text = _SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", _VARYING.sub("", str(jaxpr)))
    return hashlib.sha256((text + digest_of((list(_constants(jaxpr)), constant_out))).encode()).hexdigest()


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for part in inner_programs(eqn):
            yield from _constants(part)


def inner_programs(eqn: Any) -> list[Any]:
    """The programs in the parameters of an equation."""
    return [x for x in jax.tree.leaves(list(eqn.params.values())) if isinstance(x, Jaxpr | ClosedJaxpr)]


def versions_text() -> str:
    """What changes the last bits of results."""
    return f"jax {jax.__version__}, {jax.default_backend()}, x64 {jax.config.read('jax_enable_x64')}"


# What another version of JAX may change.
_OF_VERSIONS = {"versions", "loss", "optimiser", "score", "weights", "optimiser's state"}


def check_same_call(saved: dict[str, str], now: dict[str, str], path: Any) -> None:
    """Raises if a file is of another call; warns if it was written by another version of JAX."""
    is_other = saved["versions"] != now["versions"]
    left_out = _OF_VERSIONS if is_other else set()
    differ = [name for name in {**saved, **now} if name not in left_out and saved.get(name) != now.get(name)]
    if differ:
        lines = [f"  `{name}`: saved {saved.get(name)}, now {now.get(name)}" for name in differ]
        raise ValueError(
            f"`{caller()}` cannot resume from `{path}`: this call differs from the one that wrote it.\n"
            + "\n".join(lines)
            + "\nRepeat that call, or save elsewhere."
        )
    if is_other:
        versions = f"{saved['versions']}; this is {now['versions']}"
        warn(f"`{caller()}` resumes from `{path}`, which was written by {versions}: the last bits may differ.")
