from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._ensemble import Ensemble
from ..._predict import predict
from ..._pytree import PyTree
from ._check import check_predictions, units_message
from ._match import Order
from ._resolve import Group

Orders = list[list[list[Order]]]
"""One order per member, group and part."""


def check_equal_predictions(
    ensemble: Ensemble[Any],
    state: eqx.nn.State | None,
    permuted: Callable[[Orders], tuple[Ensemble[Any], eqx.nn.State | None]],
    shuffled: Orders,
    groups: list[Group],
    x: PyTree,
    fn: Callable[..., Any] | None,
) -> None:
    """Raises if members with shuffled units give other predictions, and lists the groups that cause the change."""
    call: Any = predict  # its overloads are for known types
    before = check_predictions(call(ensemble, x, state=state, fn=fn))

    def change(orders: Orders) -> float:
        moved, moved_state = permuted(orders)
        return _change(before, check_predictions(call(moved, x, state=moved_state, fn=fn)))

    if (found := change(shuffled)) <= 1:
        return
    still = [[np.arange(part.size) for part in group.parts] for group in groups]
    only = lambda i: [[own[j] if j == i else still[j] for j in range(len(groups))] for own in shuffled]
    changes = {i: change(only(i)) for i in range(len(groups))}
    described = [_describe(groups[i]) for i, size in changes.items() if size > 1]
    raise ValueError(units_message(described, found))


def _change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """The largest difference, in multiples of the rounding tolerance."""
    most = 0.0
    for x, y in zip(before, after, strict=True):
        rounding = float(jnp.finfo(x.dtype).eps) ** 0.5 * np.abs(x).max(initial=0)
        wide = lambda z: z.astype(np.complex128 if np.iscomplexobj(z) else np.float64)
        difference = np.abs(wide(x) - wide(y)).max(initial=0)
        most = max(most, difference / rounding if rounding else float(difference > 0) * np.inf)
    return most


def _describe(group: Group) -> str:
    axes = [axis for part in group.parts for axis in part.axes]
    listed = ", ".join(f"`{jtu.keystr(axis.path)}` axis {axis.axis}" for axis in axes)
    return f"{group.name}: {listed}"
