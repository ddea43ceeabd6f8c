"""Notes on errors inside a user's functions: where they were called, with which arguments, and the likely cause."""

import contextlib
import difflib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._axes._check_rows import UNBOUND_AXIS
from ..._check import is_member_array, kind_text
from ..._leaf_text import leaf_text
from ..._pytree import PyTree

_MOST_SHAPES = 8
_ONE_FOR_MANY = "rank should be at least 1, but is only 0"
_INTEGERS = re.compile(r"dtype.*integer|integer.* type|integer labels", re.IGNORECASE | re.DOTALL)
_KEY_WORDS = re.compile("key|rng|seed|^[kr]$|^_|^argument ")
_NUMBERS = re.compile("rate|step_size|decay|momentum|scale|clip|norm$")


@contextlib.contextmanager
def explain_loss(
    fn: Callable[..., Any], arguments: tuple[Any, ...], hyper: PyTree, *, name: str, purpose: str
) -> Iterator[None]:
    """Adds a note to an error inside a loss or a score: where it was called, with which arguments, the likely cause.

    `arguments` are those of one member: its model, its state if it has one, its batch and its key. `hyper` is `None`
    if the function does not take it.
    """
    try:
        yield
    except Exception as error:
        parameters = _parameters_of(fn, len(arguments))
        named = [*zip(parameters, arguments, strict=True), *([] if hyper is None else [("hyper", hyper)])]
        called = f"`{name}` called `{_name_of(fn)}` ({_where(fn)}) {purpose}, for one member with"
        cause = _cause(error, parameters, arguments, hyper)
        lines = [called, *(f"  {parameter}: {_short(value)}" for parameter, value in named), cause]
        error.add_note("\n".join(filter(None, lines)))
        raise


@contextlib.contextmanager
def explain_optimiser(part: str, fn: Callable[..., Any], hyper: PyTree) -> Iterator[None]:
    """Adds a note to an error inside an optimiser: which part of it ran, and the member's hyper-parameters."""
    try:
        yield
    except Exception as error:
        given = "" if hyper is None else f" with `hyper` {_short(hyper)}"
        lines = [f"This happened {part}, for one member{given}.", _missing_hyper(error, hyper)]
        strings = _strings_in(fn)
        if strings:
            lines.append(f"It holds the string {strings[0]} where optax expects a number: is a learning rate quoted?")
        error.add_note("\n".join(filter(None, lines)))
        raise


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _where(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    return "a callable object" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _parameters_of(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first positional parameters."""
    named = [*inspect.signature(fn).parameters.values()] if _has_signature(fn) else []
    words = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*words, *(f"argument {i}" for i in range(len(words), count))][:count]


def _has_signature(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    """A model as its type, everything else as the shapes of its arrays."""
    if isinstance(value, eqx.Module | eqx.nn.State):
        return type(value).__name__
    if len(jax.tree.leaves(value)) > _MOST_SHAPES:
        return f"{kind_text(value)} of {len(jax.tree.leaves(value))} leaves"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_member_array(x) else x, value)
    return " ".join(eqx.tree_pformat(shapes, width=10**6, struct_as_array=True).split())


def _cause(error: Exception, parameters: list[str], arguments: tuple[Any, ...], hyper: PyTree) -> str | None:
    model, *state, batch, _ = arguments
    leaves = [x for x in jax.tree.leaves(batch) if is_member_array(x)]
    batch_name, key_name = parameters[-2:]
    if len(leaves) > 1 and not _KEY_WORDS.search(key_name):
        before = "model, state" if state else "model"
        return (
            f"A loss is called as `loss({before}, batch, key)`: `{batch_name}` is the whole batch and `{key_name}` the "
            f"random key. Take the batch apart inside: `x, y = batch`."
        )
    call = _model_call(error, model)
    if call is not None:
        kind, given = call
        whole = [x for x in given if _is_whole_batch(x, leaves)]
        if whole:
            how = "jax.vmap(model)(x)"
            if state:
                how = 'jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)'
            batch = leaf_text(whole[0])
            return f"`{kind}` was called with {batch}, a whole batch. If it takes one example, write `{how}`."
    return _known_cause(error, leaves, hyper) or _model_shapes(call)


def _known_cause(error: Exception, leaves: list[Any], hyper: PyTree) -> str | None:
    """The causes that JAX's messages identify."""
    text = str(error)
    no_labels = [x for x in reversed(leaves) if not jnp.issubdtype(x.dtype, jnp.integer)]
    # Prefers the dtype that the error names, then the fewest axes, then the last leaf.
    no_labels.sort(key=lambda x: (x.dtype.name not in text, x.ndim))
    if no_labels and _INTEGERS.search(text):
        labels = no_labels[0]
        kind, fix = ("class", "y.astype(int)") if labels.ndim < 2 else ("one-hot", "y.argmax(axis=-1)")
        return f"If `{leaf_text(labels)}` holds {kind} labels, make them integers: `fit(..., (x, {fix}), ...)`."
    if _ONE_FOR_MANY in text:
        return (
            "`key` is one key for the whole batch. For one per example: "
            "`jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(key, len(x)))`."
        )
    if unbound := UNBOUND_AXIS.search(text):
        return (
            f"A layer needs the batch's axis by name: `jax.vmap(model, axis_name={unbound[1]!r}, in_axes=(0, None), "
            "out_axes=(0, None))(x, state)`."
        )
    return _missing_hyper(error, hyper)


def _missing_hyper(error: Exception, hyper: PyTree) -> str | None:
    if not isinstance(error, KeyError) or not isinstance(hyper, Mapping) or error.args[:1] == ():
        return None
    missing = error.args[0]
    if missing in list(hyper):
        return None
    close = difflib.get_close_matches(str(missing), [str(name) for name in hyper], n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"`hyper` has no {missing!r}; it has {', '.join(map(repr, hyper))}.{guess}"


def _model_call(error: Exception, model: Any) -> tuple[str, list[Any]] | None:
    """The outermost call of a method of the model in the traceback: its class and its array arguments."""
    kinds = {type(x) for x in _modules_in(model)}
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        code = frame.f_code
        words = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if words[:1] == ("self",) and type(frame.f_locals.get("self")) in kinds:
            given = [frame.f_locals.get(word) for word in words[1:]]
            # A state that was used cannot be flattened.
            given = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, eqx.nn.State))
            return type(frame.f_locals["self"]).__name__, [x for x in given if isinstance(x, jax.Array)]
    return None


def _modules_in(tree: PyTree) -> Iterator[eqx.Module]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, eqx.Module):
            yield node
        inner = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node and isinstance(x, eqx.Module))
        stack += [x for x in inner if isinstance(x, eqx.Module) and x is not node]


def _is_whole_batch(x: Any, leaves: list[Any]) -> bool:
    """Whether an argument is a leaf of the batch, or has the shape of one and not that of an example."""
    if any(x is leaf for leaf in leaves):
        return True
    an_example = {leaf.shape[1:] for leaf in leaves}
    return x.ndim > 0 and x.shape not in an_example and x.shape in {leaf.shape for leaf in leaves}


def _model_shapes(call: tuple[str, list[Any]] | None) -> str | None:
    if call is None or not call[1]:
        return None
    return f"`{call[0]}` was called with {', '.join(map(leaf_text, call[1]))}."


def _strings_in(fn: Any) -> list[str]:
    """The strings in the closures of an optimiser where optax keeps numbers."""
    found, seen, todo = [], set(), [fn]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, tuple | list):
            todo += part
        if not isinstance(part, types.FunctionType):
            continue
        for word, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            value = None if cell == types.CellType() else cell.cell_contents
            if isinstance(value, str) and _NUMBERS.search(word):
                found.append(f"`{word}={value!r}`")
            todo.append(value)
    return found
