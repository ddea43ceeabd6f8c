"""Short texts of values, functions and programs, the same in every process."""

import hashlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ... import _axes
from ..._check import is_typed_key
from ..._jaxpr import inner_jaxprs
from ..._pytree import PyTree
from ...checkpoint._check_like import shape_text
from ...distributed import to_host
from ...tree._statics import static_parts

_ADDRESS = re.compile(r"(?: at )?0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")
_SHOWN = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


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


def program_text(fn: Callable[..., Any], *args: PyTree) -> tuple[str, PyTree]:
    """A digest of the traced program of `fn` with all its constants, and the shapes of its results."""
    jaxpr, out, constant_out = eqx.filter_make_jaxpr(fn)(*args)
    text = _ADDRESS.sub("", str(jaxpr))
    text = _SET.sub(lambda found: f"frozenset({{{', '.join(sorted(found[1].split(', ')))}}})", text)
    digest = hashlib.sha256(text.encode())
    for constant in _constants(jaxpr):
        _add(digest, "", constant)
    digest.update(digest_of(constant_out).encode())  # constants among its outputs
    return digest.hexdigest(), out


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for part in inner_jaxprs(eqn):
            yield from _constants(part)


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex | np.generic):
            _add(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


def _add(digest: Any, path: str, leaf: Any) -> None:
    if is_typed_key(leaf):
        path, leaf = f"{path} {jax.random.key_impl(leaf)}", jax.random.key_data(leaf)
    array = np.ascontiguousarray(to_host(leaf))
    digest.update(f"{path} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)


def function_text(fn: Callable[..., Any], *args: PyTree) -> str:
    """A function's name and a digest of its program for such arguments, or of its code if it cannot be traced."""
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    try:
        return f"{name} {program_text(fn, *args)[0]}"
    except Exception:  # it may use concrete values; another error is raised again where it is called
        return f"{name} {_code_digest(fn)}"


def code_text(x: Any) -> str:
    """The name of a function, or of the type of an object, and a digest of its code and of all that it refers to."""
    return f"{getattr(x, '__qualname__', type(x).__qualname__)} {_code_digest(x)}"


def _code_digest(fn: Any) -> str:
    digest = hashlib.sha256()
    _add_part(digest, fn, {})
    return digest.hexdigest()


def _add_part(digest: Any, x: Any, seen: dict[int, tuple[int, Any]]) -> None:
    """Adds the parts of a function or an object, down to numbers and names."""
    if isinstance(x, _PLAIN) or isinstance(x, np.generic):
        digest.update(f"{type(x).__name__} {x!r}".encode())
    elif _axes.is_array(x):
        _add(digest, "", x)
    elif isinstance(x, type | types.ModuleType):
        digest.update(getattr(x, "__qualname__", x.__name__).encode())
    elif isinstance(x, set | frozenset):
        digest.update(f"{type(x).__name__} {sorted(map(repr, x))}".encode())
    elif id(x) in seen:
        digest.update(f"number {seen[id(x)][0]}".encode())
    else:
        seen[id(x)] = len(seen), x  # kept alive, so that its id is not reused
        parts = static_parts(x)
        digest.update(f"{type(x).__qualname__} {'' if parts else _ADDRESS.sub('', repr(x))}".encode())
        if isinstance(x, types.FunctionType):
            parts = (parts or {}) | _globals_of(x)
        for name, part in (parts or {}).items():
            digest.update(str(name).encode())
            _add_part(digest, part, seen)


def _globals_of(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that a function reads: numbers, arrays and functions of its module; others count by name."""
    names, codes = set(), [fn.__code__]
    for code in codes:
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    read = {name: fn.__globals__[name] for name in sorted(names) if name in fn.__globals__}
    own = lambda x: isinstance(x, types.FunctionType) and x.__module__ == fn.__module__
    return {
        f"global `{name}`": x
        for name, x in read.items()
        if isinstance(x, _PLAIN + (np.generic,)) or _axes.is_array(x) or own(x)
    }
