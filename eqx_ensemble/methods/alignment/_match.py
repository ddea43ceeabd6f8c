"""Weight matching: finds, for each group of units in turn, the order that best matches the reference."""

from itertools import product

import numpy as np

from ._resolve import Axis, Group, Part, Path

Arrays = dict[Path, np.ndarray]
Order = np.ndarray
"""The unit of a member at each position."""

_TOLERANCE = 1e-12


def match(groups: list[Group], member: Arrays, reference: Arrays, rng: np.random.Generator) -> list[list[Order]]:
    """The orders of all groups' parts, by coordinate ascent on the inner product of member and reference."""
    orders = [[np.arange(part.size) for part in group.parts] for group in groups]
    scale = sum(np.linalg.norm(member[path]) * np.linalg.norm(reference[path]) for path in member)
    gaining = True
    while gaining:
        gaining = False
        for i in rng.permutation(len(groups)).tolist():
            before = orders[i]
            found = _best(groups[i], _gains(groups, orders, i, member, reference))
            value = _similarity(groups, orders, i, member, reference)
            orders[i] = found
            # If an array has the units on both axes, the best order given the old one on the other axis may be worse.
            if _similarity(groups, orders, i, member, reference) > value + _TOLERANCE * scale:
                gaining = True
            else:
                orders[i] = before
    return orders


def shuffle(group: Group, rng: np.random.Generator) -> list[Order]:
    """Random orders of the parts of a group: of the blocks, and of the units inside each block."""
    blocks = _other_order(group.num_blocks, rng)
    inside = [part.size // group.num_blocks for part in group.parts]
    return [np.concatenate([size * block + _other_order(size, rng) for block in blocks]) for size in inside]


def _other_order(size: int, rng: np.random.Generator) -> Order:
    """A random order that differs from the identity, which would test nothing."""
    order = rng.permutation(size)
    while size > 1 and (order == np.arange(size)).all():
        order = rng.permutation(size)
    return order


def permute(array: np.ndarray, axes: list[tuple[Axis, Order]]) -> np.ndarray:
    """Permutes the units of an array."""
    for axis, order in axes:
        array = np.take(array, entries(order, axis.repeat), axis=axis.axis)
    return array


def entries(order: Order, repeat: int) -> np.ndarray:
    """Indices along an axis with `repeat` entries for each unit, for an order of its units."""
    return (order[:, None] * repeat + np.arange(repeat)).ravel()


def _axes_of(groups: list[Group], orders: list[list[Order]], path: Path) -> list[tuple[Axis, Order]]:
    return [
        (axis, order)
        for group, own in zip(groups, orders, strict=True)
        for part, order in zip(group.parts, own, strict=True)
        for axis in part.axes
        if axis.path == path
    ]


def _gains(
    groups: list[Group], orders: list[list[Order]], i: int, member: Arrays, reference: Arrays
) -> list[np.ndarray]:
    """For each part of group `i`, `(size, size)`: the inner product of unit `k` of the member at position `j`."""

    def gain(part: Part) -> np.ndarray:
        total = np.zeros((part.size, part.size))
        for axis in part.axes:
            others = [pair for pair in _axes_of(groups, orders, axis.path) if pair[0] != axis]
            rows = lambda x, axis=axis: np.moveaxis(x, axis.axis, 0).reshape(part.size, -1)
            total += np.real(rows(reference[axis.path]) @ rows(permute(member[axis.path], others)).conj().T)
        return total

    return [gain(part) for part in groups[i].parts]


def _similarity(groups: list[Group], orders: list[list[Order]], i: int, member: Arrays, reference: Arrays) -> float:
    """The inner product of all arrays that hold units of group `i`."""
    paths = dict.fromkeys(axis.path for part in groups[i].parts for axis in part.axes)
    moved = {path: permute(member[path], _axes_of(groups, orders, path)) for path in paths}
    return float(sum(np.real(np.vdot(reference[path], moved[path])) for path in paths))


def _best(group: Group, gains: list[np.ndarray]) -> list[Order]:
    """The orders with the largest gain: of the blocks, and of the units inside each block."""
    from scipy.optimize import linear_sum_assignment

    assign = lambda gain: linear_sum_assignment(gain, maximize=True)[1]
    blocks = group.num_blocks
    # (blocks, units, blocks, units): the gain of each unit of each block at each position of each other block.
    inside = [gain.reshape(blocks, len(gain) // blocks, blocks, -1) for gain in gains]
    orders = {(j, k): [assign(gain[j, :, k]) for gain in inside] for j, k in product(range(blocks), repeat=2)}
    value = np.zeros((blocks, blocks))
    for (j, k), own in orders.items():
        value[j, k] = sum(gain[j, np.arange(len(o)), k, o].sum() for gain, o in zip(inside, own, strict=True))
    chosen = enumerate(assign(value))
    pairs = [(k, orders[j, k]) for j, k in chosen]
    return [np.concatenate([k * gain.shape[1] + own[part] for k, own in pairs]) for part, gain in enumerate(inside)]
