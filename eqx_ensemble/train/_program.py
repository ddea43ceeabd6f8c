import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Int, PyTree

from .. import _axes
from ..plan import AbstractPlan
from ._health import judged_one
from ._loss import Loss
from ._optimiser import Optimiser
from ._select import Selection, select
from ._state import Fixed, Moving
from ._step import all_members_step


class Carry(eqx.Module):
    """What a run changes, stacked; donated to every chunk."""

    moving: Moving
    selection: Selection | None
    step: Int[Array, ""]


class Inputs(eqx.Module):
    """What a run only reads."""

    fixed: Fixed
    shared: PyTree
    data: PyTree
    validation: PyTree


class Program(eqx.Module):
    """How a run is carried out: everything that decides its compiled program, and nothing that changes in it."""

    loss: Loss
    score: Loss | None
    optimiser: Optimiser = eqx.field(static=True)
    plan: AbstractPlan
    patience: int | None = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)
    own_rows: bool = eqx.field(static=True)

    def step(self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members batch"] | None) -> tuple[Carry, PyTree]:
        """One step of all members on the given rows of the data; on the data themselves when `rows` is `None`.

        It is not yet judged.
        """
        own_data, view, _ = _split_data(inputs.data, inputs.fixed)
        own = (own_data, rows if self.own_rows else None)

        def batch_of(own: PyTree) -> PyTree:
            own_data, own_rows = own
            chosen = own_rows if self.own_rows else rows
            return view(own_data) if chosen is None else take_rows(view(own_data), chosen)

        moving, outputs = all_members_step(
            carry.moving,
            inputs.fixed,
            inputs.shared,
            carry.step,
            own,
            batch_of,
            loss=self.loss,
            optimiser=self.optimiser,
            plan=self.plan,
        )
        return Carry(moving, carry.selection, carry.step + 1), outputs

    def judged_step(
        self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members batch"] | None
    ) -> tuple[Carry, PyTree]:
        """One step of all members, after which the faulty keep their last good weights."""
        after, outputs = self.step(inputs, carry, rows)
        moving, outputs = judged_one(carry.moving, after.moving, outputs, carry.step)
        return Carry(moving, carry.selection, after.step), outputs

    def end_epoch(self, inputs: Inputs, carry: Carry) -> tuple[Carry, PyTree]:
        """Scores every member on the validation data, keeps its best weights, stops it when its patience ends."""
        if self.score is None or carry.selection is None:
            return carry, None
        moving, selection, scores = select(
            self.score,
            carry.moving,
            carry.selection,
            inputs,
            carry.step,
            plan=self.plan,
            patience=self.patience,
            min_delta=self.min_delta,
        )
        return Carry(moving, selection, carry.step), scores


def _split_data(data: PyTree, fixed: Fixed) -> tuple[PyTree, Callable[[PyTree], PyTree], int]:
    own, view, count = _axes.split_members((_axes.Each(fixed.key), data), name="fit")
    return own, lambda part: view(part)[1], count


def take_rows(data: PyTree, rows: Int[Array, " batch"]) -> PyTree:
    """Rows of every array; the indices were checked on the host."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), data)


def slow_in_loops(program: Program, inputs: Inputs, carry: Carry, rows: jax.ShapeDtypeStruct) -> bool:
    """Whether a step should not stand inside a compiled loop: XLA's CPU convolutions are several times slower there."""
    if jax.default_backend() != "cpu":
        return False
    leaves, treedef = jax.tree.flatten((program, inputs, carry, rows))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
    return _step_has_convolution(shapes, treedef)


@ft.lru_cache(maxsize=64)
def _step_has_convolution(leaves: tuple, treedef: Any) -> bool:
    program, inputs, carry, rows = jax.tree.unflatten(treedef, leaves)
    closed, _, _ = eqx.filter_make_jaxpr(program.step)(inputs, carry, rows)
    return _has_convolution(closed.jaxpr)


def _has_convolution(jaxpr: Jaxpr) -> bool:
    inner = [
        part.jaxpr if isinstance(part, ClosedJaxpr) else part
        for eqn in jaxpr.eqns
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr))
        if isinstance(part, Jaxpr | ClosedJaxpr)
    ]
    here = any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns)
    return here or any(map(_has_convolution, inner))
