import copy
import dataclasses
import time
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ... import _axes, _check
from ...sharding._layout import Layout
from ..compiled._chunk import compiled_batch
from ..compiled._program import Carry, Inputs
from ..compiled._select import EPOCH
from ..host._loop import Loop
from ..resume._texts import digest_of
from ._data import on_device, shapes_of_one
from ._place import Length, Place

_END = object()
_MANY_SHAPES = 8
_SAVES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # of grain, of torch


class BatchFeed:
    """One pass over an iterable of batches, which can have the next one, `waiting`, on the device early."""

    def __init__(self, batches: Iterable[PyTree], num_members: int, state: Any, layout: Layout | None):
        self._iterator, self._num_members, self._layout = iter(batches), num_members, layout
        self._holder, self._names = _with_state(self._iterator, batches)
        if state is not None:
            _check.goes_on_with_data(able=self._holder is not None)
            getattr(self._holder, self._names[1])(copy.deepcopy(state))
            if self._holder is not self._iterator:  # a loader goes on with the next iterator that it makes
                self._iterator = iter(batches)
        self.waiting: PyTree = None
        self._drawn = self._over = False
        self._before: Any = None
        self._error: Exception | None = None

    @property
    def state(self) -> Any:
        """Where the iterator stood after the batch taken last, if it says that; at its end, just before it.

        It is a copy: what an iterator gives may be its own live state, which the next batch changes.
        """
        if self._holder is None:
            return None
        return self._before if self._drawn else copy.deepcopy(getattr(self._holder, self._names[0])())

    def peek(self) -> PyTree:
        """The next batch on the device, checked; `None` at the end. What was wrong with it is raised here."""
        self.draw()
        if self._error is not None:
            raise self._error
        return self.waiting

    def take(self) -> PyTree:
        """The same, which is then used."""
        batch = self.peek()
        self.waiting, self._drawn = None, self._over
        return batch

    def pass_over(self) -> bool:
        """Draws a batch without using it. Returns whether there was one."""
        if self._drawn:
            self.peek()
            self.waiting, self._drawn = None, False
            return not self._over
        return next(self._iterator, _END) is not _END

    def draw(self) -> None:
        """Has the next batch waiting, if there is one.

        An error waits too, until it is the batch's turn: the one before is still at work.
        """
        if self._drawn or self._over:
            return
        try:
            self._before, self._drawn = self.state, True
            self.waiting = self._next()
        except Exception as error:
            self._error = error

    def _next(self) -> PyTree:
        batch = next(self._iterator, _END)
        if batch is _END:
            self._over = True
            return None
        batch = jax.tree.map(_as_numpy, batch)
        return on_device(batch, self._num_members, argument="batch", name="fit", layout=self._layout)[0]


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


class Batches:
    """An iterable of batches, iterated once an epoch."""

    rows = None

    def __init__(self, batches: Iterable[PyTree], num_members: int, layout: Layout | None):
        self._batches, self._num_members, self._layout = batches, num_members, layout
        self._first: BatchFeed | None = None

    @property
    def texts(self) -> dict[str, str]:
        """What is known of the data beforehand: nothing."""
        return {}

    def batch(self) -> PyTree:
        """The shapes of the first batch as one member sees it."""
        self._first = self._feed()
        first = self._first.peek()
        _check.some_batches(int(first is not None), 0, name="fit")
        return shapes_of_one(first)

    def run(self, loop: Loop, inputs: Inputs, carry: Carry, length: Length) -> Carry:
        """Runs one compiled step per batch, the next one being fetched meanwhile."""
        loop.line.total, loop.line.n = length.steps, loop.record.steps - length.begun
        first_step = loop.record.steps
        last_step = None if length.steps is None else length.begun + length.steps
        _check.not_beyond(first_step, last_step, "steps")
        _check.countable(last_step, name="fit")
        seen: set[Any] = set()
        inputs, carry = loop.begin(inputs, carry)
        done, taken, state, _ = loop.place
        _check.not_beyond(done, length.epochs, "epochs")
        going_on, feed = state is not None, None
        while not (loop.over(carry) or done == length.epochs or loop.record.steps == last_step):
            feed = self._feed_from(loop.place) if feed is None else self._feed()
            while (batch := feed.take()) is not None:
                start = time.perf_counter()
                _warn_of_many_shapes(batch, seen)
                own = loop.roster.own(batch)
                if loop.record.steps == first_step:
                    loop.look(dataclasses.replace(inputs, data=own), carry, None, steps_inside=False)
                carry, outputs = loop.call(compiled_batch, inputs, own, carry=carry)
                if loop.record.steps + 1 != last_step:
                    feed.draw()  # while the device works
                taken += 1
                loop.add_steps(jax.tree.map(lambda x: x[None], outputs))
                loop.place, loop.batch, loop.carry = Place(done, taken, feed.state), batch, carry
                steps_left = None if last_step is None else last_step - loop.record.steps
                loop.pace(1, time.perf_counter() - start, steps_left)
                loop.report(1, carry)
                inputs, carry = loop.care_for(inputs, carry)
                loop.save(carry, if_due=True)
                if loop.over(carry) or steps_left == 0:
                    break
                inputs, carry = loop.without_those_who_left(inputs, carry, steps_left)
            else:
                if taken > 0 or not going_on:  # or the run before had counted an epoch whose end it did not see
                    _check.some_batches(taken, done, name="fit")
                    done += 1
                if loop.program.score is not None:
                    carry = loop.validate(inputs, carry, EPOCH)
                taken, going_on, loop.place = 0, False, Place(done, 0, feed.state)
        loop.save(carry, if_due=False)
        if done == 0 and loop.program.patience is not None and loop.record.steps == last_step:
            warnings.warn(_check.IDLE_PATIENCE, stacklevel=3)
        return loop.last_validation(inputs, carry)

    def _feed(self, state: Any = None) -> BatchFeed:
        return BatchFeed(self._batches, self._num_members, state, self._layout)

    def _feed_from(self, place: Place) -> BatchFeed:
        """Batches from the place on; what cannot say where it stands is drawn again from its beginning."""
        feed, self._first = self._first, None
        if place.state is not None:
            return self._feed(place.state)
        feed = self._feed() if feed is None else feed
        for _ in range(place.epochs):
            while feed.pass_over():
                pass
            feed = self._feed()
        for _ in range(place.batches - 1):
            feed.pass_over()
        if place.batches > 0:
            _check.same_batches(digest_of(feed.take()), place.digest)
        return feed


def _warn_of_many_shapes(batch: PyTree, seen: set[Any]) -> None:
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batch))
    before = len(seen)
    seen.add(shapes)
    if before < len(seen) == _MANY_SHAPES:
        warnings.warn(_check.many_shapes(seen), stacklevel=4)
