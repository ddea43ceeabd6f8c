import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._check import is_traced
from .._pytree import PyTree
from .compiled._optimiser import Optimiser, resolve

# Names of numbers in the closures of optax's functions. Masks, labels and the tables of schedules have other names.
_NUMBERS = re.compile(
    r"step_size|learning_rate|.*decay(_rate)?|momentum|b[123]|eps.*|max_norm|max_delta|clipping|threshold"
    r"|(init_|end_|peak_)?value"
)
_NAMES = {"step_size": "learning_rate"}
_MASKS = ("masked", "partition", "multi_transform")


def check_no_numbers_of_members(
    optimiser: Optimiser, params: PyTree, hyper: PyTree, num_members: int, *, name: str
) -> None:
    """Raises if an optax optimiser holds an array of one number per member where it takes a scalar.

    Each member's optimiser would broadcast it over the last axis of the weights. An array with the shape of all weights
    of a member is accepted as one number per weight; under a mask, the shape of some weights suffices.
    """
    if num_members == 1:  # the array acts as a scalar
        return
    shapes = {x.shape[1:] for x in jax.tree.leaves(params)}
    for found in _arrays_of(optimiser, hyper):
        shape = found.value.shape
        is_of_weights = shape in shapes if found.is_masked else shapes == {shape}
        if shape[:1] == (num_members,) and not is_of_weights:
            word = _NAMES.get(found.name, found.name)
            raise ValueError(
                f"`{name}` needs an optimiser of one member; this one holds `{word}` as an array {shape}, which optax "
                f"would broadcast over the last axis of the weights.\n"
                f"One number for each of {num_members} members? Pass `hyper={{'{word}': ...}}` with the array, and the "
                f"optimiser as a function: `lambda h: optax.sgd(...)` with `h['{word}']` instead of it."
            )


class _Found(NamedTuple):
    """A value in the closure of a function; whether that is of optax, and whether it is used under a mask."""

    name: str
    value: Any
    is_of_optax: bool = False
    is_masked: bool = False


def _arrays_of(optimiser: Optimiser, hyper: PyTree) -> list[_Found]:
    if isinstance(optimiser, optax.GradientTransformation):
        return [*_arrays_in(optimiser)]
    found: list[_Found] = []
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, hyper)
    try:
        eqx.filter_eval_shape(lambda hyper: found.extend(_arrays_in(resolve(optimiser, hyper))), one)
    except Exception:  # raised again, with a note, where it is made for training
        return []
    return found


def _arrays_in(root: Any) -> Iterator[_Found]:
    """Yields the floating-point arrays in closures of optax's functions whose names are those of numbers."""
    seen, todo = set(), [_Found("", root)]
    while todo:
        one = todo.pop()
        part = one.value
        if one.is_of_optax and _NUMBERS.fullmatch(one.name) and _is_float_array(part):
            yield one
        if id(part) not in seen:
            seen.add(id(part))
            todo += _parts(one)


def _parts(one: _Found) -> list[_Found]:
    part = one.value
    if isinstance(part, tuple | list):
        return [_Found("", x, is_masked=one.is_masked) for x in part]
    if isinstance(part, dict):
        return [one._replace(name=str(key), value=x) for key, x in part.items()]
    if isinstance(part, types.MethodType):  # of `optax.MultiSteps`
        return [_Found("", x, is_masked=one.is_masked) for x in getattr(part.__self__, "__dict__", {}).values()]
    if not isinstance(part, types.FunctionType):
        return []
    module = part.__module__ or ""
    inside = module.split(".")[0] == "optax"
    masked = one.is_masked or (inside and part.__qualname__.split(".")[0] in _MASKS)
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    return [_Found(word, cell.cell_contents, inside, masked) for word, cell in cells if cell != types.CellType()]


def _is_float_array(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray) and not is_traced(x)
    return is_array and x.ndim > 0 and bool(jnp.issubdtype(x.dtype, jnp.floating))
