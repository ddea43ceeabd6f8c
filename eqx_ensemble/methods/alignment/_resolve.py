from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from ..._axes import is_array
from ._check import check_axis_of, check_divisible, check_some_axes, check_some_units, check_where
from ._layers import input_axes, output_axes
from ._units import Heads, Units

Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """The path and shape of an array of a model."""

    path: Path
    shape: tuple[int, ...]


class Axis(NamedTuple):
    """An axis of an array with `repeat` entries per unit."""

    path: Path
    axis: int
    repeat: int


class Part(NamedTuple):
    """Axes that share one order of `size` units, and the BatchNorms whose statistics share it."""

    size: int
    axes: tuple[Axis, ...]
    batch_norms: tuple[eqx.nn.BatchNorm, ...]


class Group(NamedTuple):
    """Parts whose `num_blocks` blocks of units are permuted together: one part for hidden units, two for heads."""

    name: str
    num_blocks: int
    parts: tuple[Part, ...]


def outline(model: Any) -> Any:
    """The model with a `Leaf` for each of its arrays."""
    return jtu.tree_map_with_path(lambda path, x: Leaf(path, x.shape) if is_array(x) else x, model)


def resolve(units: list[Units | Heads], model: Any) -> list[Group]:
    """Resolves units to axes of the arrays of a model."""
    drawn = outline(model)
    return [_group(each, drawn, i) for i, each in enumerate(units)]


def _group(units: Units | Heads, model: Any, number: int) -> Group:
    name = f"units[{number}]"
    if isinstance(units, Units):
        return Group(name, 1, (_part(units, model, name),))
    parts = _part(units.qk, model, f"{name}.qk"), _part(units.vo, model, f"{name}.vo")
    for part in parts:
        check_divisible(part.size, units.num_heads, f"{name}: {part.size} units in {units.num_heads} heads")
    return Group(name, units.num_heads, parts)


def _part(units: Units, model: Any, name: str) -> Part:
    found, norms = [], []
    for argument, entries, axes_of in (("outputs", units.outputs, output_axes), ("inputs", units.inputs, input_axes)):
        for i, entry in enumerate(entries):
            path = f"{name}.{argument}[{i}]"
            if isinstance(entry, tuple):
                leaf = check_where(entry[0], model, path)
                found.append((check_axis_of(leaf, entry[1], path, Leaf), entry[1] % len(leaf.shape)))
                continue
            layer = check_where(entry, model, path)
            found += check_some_axes(axes_of(layer), layer, path, argument)
            norms += [layer] if isinstance(layer, eqx.nn.BatchNorm) else []
    check_some_units(found, norms, name)
    size = units.size or _size(found, norms)
    axes = [Axis(leaf.path, axis, _repeat(leaf, axis, size, name)) for leaf, axis in found]
    for norm in norms:
        check_divisible(norm.input_size, size, f"{name}: `BatchNorm` of {norm.input_size} for {size} units")
    return Part(size, tuple(dict.fromkeys(axes)), tuple(norms))


def _size(found: list[tuple[Leaf, int]], norms: list[eqx.nn.BatchNorm]) -> int:
    """The number of units of the first array, or else of the first norm."""
    return found[0][0].shape[found[0][1]] if found else norms[0].input_size


def _repeat(leaf: Leaf, axis: int, size: int, name: str) -> int:
    length = leaf.shape[axis]
    check_divisible(length, size, f"{name}: axis {axis} of `{jtu.keystr(leaf.path)}` {leaf.shape} for {size} units")
    return length // size
