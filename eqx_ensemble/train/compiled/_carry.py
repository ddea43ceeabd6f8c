import equinox as eqx
from jaxtyping import Array, Int

from ..._pytree import PyTree
from .._state import MemberConstants, MemberState
from ._order import RowOrder
from ._selection import Limits, Selection


class Carry(eqx.Module):
    """The arrays that a run changes, stacked; donated to every chunk."""

    moving: MemberState
    selection: Selection | None
    step: Int[Array, ""]


class Inputs(eqx.Module):
    """The arrays that a run only reads, of all members or of the active ones; without an order, data are a batch."""

    fixed: MemberConstants
    shared: PyTree
    data: PyTree
    validation: PyTree = None
    limits: Limits = Limits()
    order: RowOrder | None = None
