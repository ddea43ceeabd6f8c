import dataclasses
import time
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check
from ._chunk import compiled_batch, compiled_validation
from ._data import on_device
from ._loop import Loop
from ._program import Carry, Inputs

_MANY_SHAPES = 8
_SAVES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # of grain, of torch


class BatchFeed:
    """One pass over an iterable of batches, which can have the next one on the device before it is asked for."""

    def __init__(self, batches: Iterable[PyTree], num_members: int, state: Any):
        self._iterator, self._num_members = iter(batches), num_members
        self._holder, self._names = _with_state(self._iterator, batches)
        if state is not None:
            _check.goes_on_with_data(able=self._holder is not None)
            getattr(self._holder, self._names[1])(state)
            if self._holder is not self._iterator:  # a loader goes on with the next iterator that it makes
                self._iterator = iter(batches)
        self._waiting: PyTree = None
        self._drawn = self._over = False
        self._before: Any = None

    @property
    def state(self) -> Any:
        """Where the iterator stood after the batch taken last, if it says that; `None` at the end."""
        if self._over or self._holder is None:
            return None
        return self._before if self._drawn else getattr(self._holder, self._names[0])()

    def take(self) -> PyTree:
        """The next batch on the device, checked; `None` at the end."""
        self.draw()
        batch, self._waiting, self._drawn = self._waiting, None, False
        return batch

    def draw(self) -> None:
        """Has the next batch waiting, if there is one."""
        if self._drawn or self._over:
            return
        self._before = self.state
        self._drawn, batch = True, next(self._iterator, None)
        if batch is None:
            self._over = True
            return
        batch = jax.tree.map(_as_numpy, batch)
        self._waiting, _ = on_device(batch, self._num_members, argument="batch", name="fit")


def _as_numpy(x: Any) -> Any:
    """Arrays of other frameworks, such as the tensors of a torch loader, as NumPy arrays."""
    return np.asarray(x) if hasattr(x, "__dlpack__") and not _axes.is_array(x) else x


def _with_state(*candidates: Any) -> tuple[Any, tuple[str, str]]:
    """The first that can say where it stands, and be set there, with the names of its methods."""
    for candidate in candidates:
        for names in _SAVES:
            if all(callable(getattr(candidate, name, None)) for name in names):
                return candidate, names
    return None, ("", "")


def run_batches(
    loop: Loop,
    inputs: Inputs,
    carry: Carry,
    batches: Iterable[PyTree],
    *,
    data_state: Any,
    epochs: int | None,
    steps: int | None,
) -> Carry:
    """Runs over an iterable of batches, one compiled step per batch, the next one being fetched meanwhile."""
    num_members = inputs.fixed.key.shape[0]
    loop.line.total = steps
    first_step = loop.record.steps
    last_step = None if steps is None else first_step + steps
    seen: set[Any] = set()
    done, resumed = 0, data_state
    while epochs is None or done < epochs:
        before = loop.record.steps
        feed = BatchFeed(batches, num_members, resumed)
        resuming, resumed = resumed is not None, None
        while (batch := feed.take()) is not None:
            start = time.perf_counter()
            _warn_of_many_shapes(batch, seen)
            batch = loop.roster.own(batch)
            if loop.record.steps == first_step:
                loop.look(dataclasses.replace(inputs, data=batch), carry, None, steps_inside=False)
            carry, outputs = loop.call(compiled_batch, inputs, batch, carry=carry)
            if loop.record.steps + 1 != last_step:
                feed.draw()  # while the device works
            loop.data_state = feed.state
            loop.add_steps(jax.tree.map(lambda x: x[None], outputs))
            steps_left = None if last_step is None else last_step - loop.record.steps
            loop.pace(1, time.perf_counter() - start, steps_left)
            loop.report(1, carry)
            inputs, carry = loop.care_for(inputs, carry)
            if loop.over(carry) or steps_left == 0:
                if done == 0 and loop.program.patience is not None and steps_left == 0:
                    warnings.warn(_check.IDLE_PATIENCE, stacklevel=3)
                return loop.last_validation(inputs, carry)
            inputs, carry = loop.without_those_who_left(inputs, carry, steps_left)
        loop.data_state = None
        if resuming and loop.record.steps == before:
            continue  # the run before had stopped at the very end of an epoch
        _check.some_batches(loop.record.steps - before, done, name="fit")
        done += 1
        if loop.program.score is not None:
            carry, scores = compiled_validation((loop.program, inputs), carry)
            loop.add_scores(scores)
        if loop.over(carry):
            break
    return carry


def _warn_of_many_shapes(batch: PyTree, seen: set[Any]) -> None:
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))
    before = len(seen)
    seen.add(shapes)
    if before < len(seen) == _MANY_SHAPES:
        warnings.warn(_check.many_shapes(seen), stacklevel=4)
