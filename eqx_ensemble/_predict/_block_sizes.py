import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _axes
from .._pytree import PyTree
from ..plan._cost import cost_of
from ..plan._memory import peak, release_memory
from ._batch import MemberCall, PredictionInputs, batch_arguments, compiled_batch, predict_batch
from ._check import budget_message
from ._work import Work

_FEW_ROWS = 32  # with fewer rows a batch, fewer members at a time are cheaper: weights are read for every batch
_MOST_STEPS_UP = 2  # a factor of four: small blocks say little about much larger ones
_SAFETY = 0.5  # of the budget: a short peak between two samples is missed, by up to two fifths on a busy machine
_REPEATS = 3  # of each block: on a busy machine a sample may come too late


class Block(NamedTuple):
    """The number of members and of rows that a program processes at a time."""

    members: int
    rows: int


class BlockSizes:
    """Chooses the block of a prediction so that the measured peak stays within a budget of bytes.

    It starts with a block whose intermediate arrays would all fit at once, which no program needs, and moves along a
    ladder of blocks, each about half of the one before: first fewer rows, then fewer members, at last single rows of
    single members.

    **Attributes:**

    - `settled`: whether the block is final.
    """

    def __init__(self, memory: int, parts: Sequence[tuple[MemberCall, PredictionInputs]], *, most_rows: int) -> None:
        self.settled = False
        self._memory = memory
        self._ladder = _ladder(Block(max(inputs.ensemble.num_members for _, inputs in parts), most_rows))
        bounds = [_byte_bound(call, inputs) for call, inputs in parts]
        need = lambda block: max(bound(block) for bound in bounds)
        fitting = (i for i, block in enumerate(self._ladder) if need(block) <= _SAFETY * memory)
        self._index = next(fitting, len(self._ladder) - 1)
        self._highest = 0

    @property
    def block(self) -> Block:
        """The block to use next."""
        return self._ladder[self._index]

    def note(self, need: int) -> None:
        """Records the bytes that the present block needed."""
        steps = math.log2(_SAFETY * self._memory / max(need, 1))
        if steps < 0 and need > self._memory and self._index == len(self._ladder) - 1:
            raise MemoryError(budget_message(need, self._memory))
        up = min(int(steps), _MOST_STEPS_UP) if steps > 0 else 0
        if steps < 0:
            self._highest = self._index + 1
            up = math.floor(steps)
        index = min(max(self._index - up, self._highest), len(self._ladder) - 1)
        self.settled = index == self._index
        self._index = index


def measure(
    works: Sequence[Work], rows: np.ndarray, predict_rows: Callable[[], Any], *, members: int
) -> tuple[Any, int]:
    """`predict_rows()`, which predicts `rows` in blocks of `members`, and the bytes that it needed at its peak.

    A peak may be too short to be sampled: the arrays that are known to exist are counted as well. Compiling is not
    included.
    """
    needs = [_of_block(work, rows, members) for work in works]
    result = jax.block_until_ready(predict_rows())
    for _ in range(_REPEATS):
        del result
        release_memory()
        with peak() as of_all:
            result = jax.block_until_ready(predict_rows())
        needs.append(of_all.bytes or 0)
    return result, max(needs)


def _of_block(work: Work, rows: np.ndarray, members: int) -> int:
    """The bytes that the first block of an ensemble needs."""
    plan, inputs = work.pilot.plan, work.inputs
    read = batch_arguments(work.call, inputs, rows, members=slice(0, members))
    compiled = compiled_batch.lower(plan, *read).compile().compiled
    release_memory()
    with peak() as of_block:
        out = jax.block_until_ready(compiled_batch(plan, *read))
    analysis = compiled.memory_analysis()
    known = _bytes(read[1].x) + _bytes(out) + (analysis.temp_size_in_bytes if analysis else 0)
    known += _bytes(read[1].ensemble) if members < inputs.ensemble.num_members else 0
    return max(known, of_block.bytes or 0)


def _ladder(most: Block) -> list[Block]:
    few = min(_FEW_ROWS, most.rows)
    blocks = [Block(most.members, rows) for rows in _halvings(most.rows) if rows >= few]
    few = blocks[-1].rows
    blocks += [Block(members, few) for members in _halvings(most.members)[1:]]
    return blocks + [Block(1, rows) for rows in _halvings(few)[1:]]


def _halvings(count: int) -> list[int]:
    """`count`, and all powers of two below it, in falling order."""
    return [count, *(2**i for i in reversed(range((count - 1).bit_length())))]


def _byte_bound(call: MemberCall, inputs: PredictionInputs) -> Callable[[Block], int]:
    """An upper bound of the bytes of intermediate arrays in a block, from those of one member and one or two rows."""
    reads = (batch_arguments(call, inputs, np.zeros(count, int)) for count in (1, 2))
    one, two = (cost_of(predict_batch, *read).bytes for read in reads)
    num_members = inputs.ensemble.num_members
    return lambda block: min(block.members, num_members) * (one + (block.rows - 1) * max(two - one, 0))


def _bytes(tree: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if _axes.is_array(x))
