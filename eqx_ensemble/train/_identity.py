"""What makes two calls of `fit` the same: programs, data, beginning and options, each in a short text."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check
from ..distributed import fetch
from ._data import shapes_of_one
from ._loss import Loss
from ._member import member_gradient
from ._optimiser import Optimiser, init_member, update_member
from ._program import Program
from ._start import Start
from ._state import Fixed, Moving

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")


class Identity(NamedTuple):
    """What a call of `fit` is.

    `texts` say it, of which those named in `traced` hold under the same versions of the libraries only; `value` and
    `aux` are the shapes of a member's loss and its auxiliary outputs.
    """

    texts: dict[str, str]
    traced: tuple[str, ...]
    value: jax.ShapeDtypeStruct
    aux: PyTree


def identity(
    program: Program, start: Start, batch: PyTree, validation: PyTree, texts: dict[str, str], options: dict[str, Any]
) -> Identity:
    """What a run is that begins at `start`.

    **Arguments:**

    - `batch`: the shapes of a batch as one member sees it.
    - `validation`: the validation data on the device.
    - `texts`: what is known of the data.
    - `options`: what else was asked for.
    """
    state, selection = start.state, start.selection
    moving, fixed = state.moving, state.fixed
    programs, value, aux = _programs(program, start, batch, validation)
    traced = programs | {
        "weights": digest_of((moving.params, fixed.frozen, moving.model_state, state.shared, state.ids)),
        "optimiser's state": digest_of((moving.opt_state, moving.status, moving.left, state.step, selection)),
    }
    options = options | {"patience": program.patience, "min_delta": program.min_delta}
    texts = {name: _text(value) for name, value in options.items()} | texts
    texts |= {"batch": _shapes_text(batch), "hyper": digest_of(fixed.hyper), "members' keys": digest_of(fixed.key)}
    return Identity(traced | texts | data_texts(validation, "validation"), tuple(traced), value, aux)


def _text(option: Any) -> str:
    if option is None or isinstance(option, str | bool | int | float):
        return repr(option)
    if dataclasses.is_dataclass(option):
        fields = (getattr(option, field.name) for field in dataclasses.fields(option))
        return f"{type(option).__name__}({', '.join(getattr(x, '__qualname__', repr(x)) for x in fields)})"
    return digest_of(option)


def _shapes_text(tree: PyTree) -> str:
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return ", ".join(f"{jax.tree_util.keystr(path)} {_check.described(x.shape, x.dtype)}".strip() for path, x in keyed)


def _programs(program: Program, start: Start, batch: PyTree, validation: PyTree) -> tuple[dict[str, str], Any, PyTree]:
    """A text for loss, score and optimiser as they are traced, and the shapes that the loss returns."""
    state = start.state
    one = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, tree
    )
    moving, fixed, ids = one((state.moving, state.fixed, state.ids))
    shared = shapes_of_one(state.shared)
    loss, ((value, (_, aux)), _) = _program_text(_gradient, program.loss, moving, fixed, shared, batch)
    texts = {"loss": loss}
    if program.score is not None:
        seen = shapes_of_one(validation)
        texts["score"] = _program_text(_score, program.score, moving, fixed, shared, seen)[0]
    texts["optimiser"] = _program_text(_update, program.optimiser, moving, fixed, ids, value)[0]
    return texts, value, aux


def _gradient(loss: Loss, moving: Moving, fixed: Fixed, shared: PyTree, batch: PyTree) -> PyTree:
    return member_gradient(moving, fixed, shared, batch, fixed.key, loss=loss)


def _score(score: Loss, moving: Moving, fixed: Fixed, shared: PyTree, validation: PyTree) -> PyTree:
    model = eqx.nn.inference_mode(eqx.combine(moving.params, fixed.frozen, shared))
    return score(model, moving.model_state, validation, fixed.key, fixed.hyper)


def _update(optimiser: Optimiser, moving: Moving, fixed: Fixed, member_id: Any, value: Any) -> PyTree:
    """The optimiser's part of a step; what stands for the loss in a line search does not matter."""
    params = moving.params
    some_loss = lambda params: jnp.asarray(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(params)), value.dtype)
    first = init_member(optimiser, params, fixed.hyper, member_id)
    return first, update_member(optimiser, params, moving.opt_state, params, value, some_loss, fixed.hyper)


def _program_text(fn: Callable[..., Any], *args: PyTree) -> tuple[str, PyTree]:
    """A digest of the program that `fn` is, with all its constants; and its results' shapes."""
    jaxpr, out, _ = eqx.filter_make_jaxpr(fn)(*args)
    text = _ADDRESS.sub("", str(jaxpr))
    text = _SET.sub(lambda found: f"frozenset({{{', '.join(sorted(found[1].split(', ')))}}})", text)
    digest = hashlib.sha256(text.encode())
    for constant in _constants(jaxpr):
        _add(digest, "", constant)
    return digest.hexdigest(), out


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    inner = getattr(jaxpr, "jaxpr", None)
    if inner is not None:
        yield from jaxpr.consts
        jaxpr = inner
    for equation in getattr(jaxpr, "eqns", ()):
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                yield from _constants(part)


def data_texts(data: PyTree, name: str) -> dict[str, str]:
    """A text for every array of some data."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(data)
    of = lambda x: f"{_check.described(x.shape, x.dtype)}, {digest_of(x)}"
    return {f"{name}{jax.tree_util.keystr(path)}": of(fetch(x)) for path, x in keyed}


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex):
            _add(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


def _add(digest: Any, path: str, leaf: Any) -> None:
    if _check.is_typed_key(leaf):
        path, leaf = f"{path} {jax.random.key_impl(leaf)}", jax.random.key_data(leaf)
    array = np.ascontiguousarray(fetch(leaf))
    digest.update(f"{path} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
