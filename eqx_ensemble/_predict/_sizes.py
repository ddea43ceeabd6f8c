import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _axes
from ..plan import AbstractPlan
from ..plan._cost import cost_of
from ..plan._memory import give_back, peak
from ._batch import Call, Inputs, arguments, compiled_batch, predict_batch
from ._check import budget_message

_FEW_ROWS = 32  # below so many rows a batch, fewer members at a time are cheaper: weights are read for every batch
_MOST_STEPS_UP = 2  # a factor of four: what a small block needed foretells only so much
_SAFETY = 0.5  # of the budget: what lives between two looks is missed, by up to two fifths on a busy machine
_LOOKS = 3  # at each block: on a busy machine one may come too late


class Block(NamedTuple):
    """How many members and how many rows go through a program at a time."""

    members: int
    rows: int


class Sizes:
    """Chooses the block of a prediction so that what is measured stays within a budget of bytes.

    It starts with a block whose intermediate arrays would fit if all of them were held at a time, which no program
    does, and goes up and down a ladder of blocks, each about half of the one before: first fewer rows, then fewer
    members, at last single rows of single members.

    **Attributes:**

    - `settled`: whether the block stays as it is.
    """

    def __init__(self, memory: int, call: Call, inputs: Inputs, *, most_rows: int):
        self.settled = False
        self._memory = memory
        self._ladder = _ladder(Block(inputs.ensemble.num_members, most_rows))
        bound = _bound(call, inputs)
        fitting = (i for i, block in enumerate(self._ladder) if bound(block) <= _SAFETY * memory)
        self._place = next(fitting, len(self._ladder) - 1)
        self._highest = 0

    @property
    def block(self) -> Block:
        """The block to go on with."""
        return self._ladder[self._place]

    def note(self, need: int) -> None:
        """Takes note of the bytes that the present block needed."""
        steps = math.log2(_SAFETY * self._memory / max(need, 1))
        if steps < 0 and need > self._memory and self._place == len(self._ladder) - 1:
            raise MemoryError(budget_message(need, self._memory))
        up = min(int(steps), _MOST_STEPS_UP) if steps > 0 else 0
        if steps < 0:
            self._highest = self._place + 1
            up = math.floor(steps)
        place = min(max(self._place - up, self._highest), len(self._ladder) - 1)
        self.settled = place == self._place
        self._place = place


def measured(
    plan: AbstractPlan, call: Call, inputs: Inputs, rows: np.ndarray, of_rows: Callable[[], Any], *, members: int
) -> tuple[Any, int]:
    """`of_rows()`, which predicts `rows` in blocks of `members`, and the bytes that it needed at its peak.

    A peak may be too short to be seen, so that the arrays that are known to be there are counted. Compiling is not part
    of it.
    """
    read = arguments(call, inputs, rows, members=slice(0, members))
    compiled = compiled_batch.lower(plan, *read).compile().compiled
    give_back()
    with peak() as of_block:
        out = jax.block_until_ready(compiled_batch(plan, *read))
    num_members, analysis = inputs.ensemble.num_members, compiled.memory_analysis()
    known = _bytes(read[1].x) + _bytes(out) + (analysis.temp_size_in_bytes if analysis else 0)
    known += _bytes(read[1].ensemble) if members < num_members else 0
    del out, read
    result, needs = jax.block_until_ready(of_rows()), [known, of_block.bytes or 0]
    for _ in range(_LOOKS):
        del result
        give_back()
        with peak() as of_all:
            result = jax.block_until_ready(of_rows())
        needs.append(of_all.bytes or 0)
    return result, max(needs)


def _ladder(most: Block) -> list[Block]:
    few = min(_FEW_ROWS, most.rows)
    blocks = [Block(most.members, rows) for rows in _halved(most.rows) if rows >= few]
    few = blocks[-1].rows
    blocks += [Block(members, few) for members in _halved(most.members)[1:]]
    return blocks + [Block(1, rows) for rows in _halved(few)[1:]]


def _halved(count: int) -> list[int]:
    """`count`, and all powers of two below it, downwards."""
    return [count, *(2**i for i in reversed(range((count - 1).bit_length())))]


def _bound(call: Call, inputs: Inputs) -> Callable[[Block], int]:
    """The most bytes of intermediate arrays in a block, from what one member needs for one row and for two."""
    reads = (arguments(call, inputs, np.zeros(count, int)) for count in (1, 2))
    one, two = (cost_of(predict_batch, *read).bytes for read in reads)
    return lambda block: block.members * (one + (block.rows - 1) * max(two - one, 0))


def _bytes(tree: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree) if _axes.is_array(x))
