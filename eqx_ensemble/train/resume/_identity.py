"""The identity of a call of `fit`: its programs, data, start and options, each as a short text."""

import functools as ft
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ..._code import is_library
from ..._jaxpr import callbacks, inner_jaxprs
from ..._pytree import PyTree
from ...checkpoint._engine import CallRecord, conditions, shape_text
from ...tree._engine import static_parts
from .._revive import Revive
from .._state import MemberConstants, MemberState
from ..compiled._loss import Loss
from ..compiled._optimiser import Optimiser, init_member, update_alone
from ..compiled._program import Program
from ..data._source import member_shapes
from ..host._start import Start
from ._code_texts import SET, add_array, array_texts, code_text, digest_of, option_text, without_addresses

# Short texts of traced programs, with the code of the Python functions that they call.

_CALLABLES = types.FunctionType | types.MethodType | types.BuiltinFunctionType | ft.partial


def function_text(fn: Callable[..., Any], *args: PyTree) -> str:
    """A function's name and a digest of its program for such arguments, or of its code if it cannot be traced."""
    try:
        return f"{getattr(fn, '__qualname__', type(fn).__qualname__)} {program_text(fn, *args)[0]}"
    except Exception:  # it may use concrete values; another error is raised again where it is called
        return code_text(fn)


def program_text(fn: Callable[..., Any], *args: PyTree) -> tuple[str, PyTree]:
    """A digest of the traced program of `fn` with its constants and host functions, and the shapes of its results."""
    jaxpr, out, constant_out = eqx.filter_make_jaxpr(fn)(*args)
    text = without_addresses(str(jaxpr))
    text = SET.sub(lambda found: f"frozenset({{{', '.join(sorted(found[1].split(', ')))}}})", text)
    digest = hashlib.sha256(text.encode())
    for constant in _constants(jaxpr):
        add_array(digest, "", constant)
    digest.update(digest_of(constant_out).encode())  # constants among its outputs
    for callback in callbacks(jaxpr):
        for function in _user_functions(callback):
            digest.update(code_text(function).encode())
    return digest.hexdigest(), out


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for part in inner_jaxprs(eqn):
            yield from _constants(part)


def _user_functions(fn: Any) -> Iterator[Any]:
    """A host function; if it is one of a library, the user's functions that it was given.

    Other variables of a library's function, such as the stack in an error of Equinox, are not part of the call.
    """
    seen: dict[int, Any] = {}
    left = [fn]
    while left:
        x = left.pop()
        if id(x) in seen or not callable(x) or isinstance(x, type):
            continue
        seen[id(x)] = x
        if isinstance(x, types.FunctionType) and is_library(str(x.__module__)):
            left += (static_parts(x) or {}).values()
        elif not is_library(type(x).__module__) or isinstance(x, _CALLABLES):
            yield x


class Identity(NamedTuple):
    """The identity of a call of `fit`.

    **Attributes:**

    - `call`: its texts; those of traced programs and of arrays that they made are its `code`.
    - `programs`: the digests of loss, score and optimiser.
    - `value`, `aux`: the shapes of a member's loss and of its auxiliary outputs.
    """

    call: CallRecord
    programs: tuple[str, ...]
    value: jax.ShapeDtypeStruct
    aux: PyTree


def identity(
    program: Program, start: Start, batch: PyTree, validation: PyTree, texts: dict[str, str], options: dict[str, Any]
) -> Identity:
    """The identity of a run that begins at `start`.

    **Arguments:**

    - `batch`: the shapes of a batch as one member sees it.
    - `validation`: the validation data on the device.
    - `texts`: the fingerprint of the data.
    - `options`: the other options of the call.
    """
    state, selection = start.state, start.selection
    moving, fixed = state.moving, state.fixed
    programs, value, aux = _programs(program, start, batch, validation)
    traced = programs | {
        "weights": digest_of((moving.params, fixed.frozen, moving.model_state, state.shared, state.ids)),
        "optimiser's state": digest_of((moving.opt_state, moving.status, moving.stopped_at, state.step, selection)),
    }
    how = options["on_diverge"]
    if isinstance(how, Revive):
        traced["on_diverge"] = _revive_text(how, fixed.hyper)
    options = options | {"patience": program.patience}
    texts = {name: option_text(value) for name, value in options.items() if name not in traced} | texts
    texts |= {"batch": _shapes_text(batch), "members' keys": digest_of(fixed.key)}
    texts |= array_texts(fixed.hyper, "hyper") | array_texts(validation, "validation")
    call = CallRecord(traced | texts, tuple(traced), conditions(x64=str(jax.config.read("jax_enable_x64"))))
    return Identity(call, tuple(programs.values()), value, aux)


def _revive_text(how: Revive, hyper: PyTree) -> str:
    """A text for a `Revive`, with its functions by their programs, not by their addresses."""
    key = jax.random.key(0)
    make = None if how.make is None else function_text(how.make, key)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), hyper)
    perturb = None if how.perturb is None or hyper is None else function_text(how.perturb, one, key)
    return f"Revive(make={make}, perturb={perturb}, most={option_text(how.most)})"


def _shapes_text(tree: PyTree) -> str:
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return ", ".join(f"{jax.tree_util.keystr(path)} {shape_text(x.shape, x.dtype)}".strip() for path, x in keyed)


def _programs(program: Program, start: Start, batch: PyTree, validation: PyTree) -> tuple[dict[str, str], Any, PyTree]:
    """The digests of loss, score and optimiser as they are traced, and the shapes that the loss returns."""
    state = start.state
    one = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, tree
    )
    moving, fixed, ids = one((state.moving, state.fixed, state.ids))
    shared = member_shapes(state.shared)
    loss, ((value, (_, aux)), _) = program_text(_gradient, program.loss, moving, fixed, shared, batch)
    texts = {"loss": loss}
    if program.score is not None:
        seen = member_shapes(validation)
        texts["score"] = program_text(_score, program.score, moving, fixed, shared, seen)[0]
    texts["optimiser"] = program_text(optimiser_step, program.optimiser, fixed.hyper, moving, ids, value)[0]
    return texts, value, aux


def _gradient(loss: Loss, moving: MemberState, fixed: MemberConstants, shared: PyTree, batch: PyTree) -> PyTree:
    rest = (moving.model_state, fixed, shared, batch, fixed.key)
    return jax.value_and_grad(loss, has_aux=True)(moving.params, *rest)


def _score(score: Loss, moving: MemberState, fixed: MemberConstants, shared: PyTree, validation: PyTree) -> PyTree:
    return score(moving.params, moving.model_state, fixed, shared, validation, fixed.key)


def optimiser_step(optimiser: Optimiser, hyper: PyTree, moving: MemberState, member_id: Any, value: Any) -> PyTree:
    """The optimiser's part of a step."""
    first = init_member(optimiser, moving.params, hyper, member_id)
    return first, update_alone(optimiser, moving.params, moving.opt_state, value, hyper)
