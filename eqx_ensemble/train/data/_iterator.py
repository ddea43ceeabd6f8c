"""One pass over an iterable of batches."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._axes._check_rows import is_finite, not_finite_text
from ..._foreign import from_foreign, own_array
from ..._pytree import PyTree
from ...sharding._layout import Layout
from ..resume._code_texts import digest_of
from ._check import check_resumable, check_same_batches, explain_state
from ._cursor import Cursor
from ._data import on_device


class Converter:
    """Checks batches, and puts them on the device.

    Checks that depend only on shapes are made once per shape. NumPy arrays are copied, because an iterator may
    overwrite its own; later ones are transferred to the device on first use.

    **Attributes:**

    - `shapes`: those of all batches so far, each with its dtypes.
    - `fault`: the first array of a batch that was not finite, in words.
    """

    def __init__(self, num_members: int, layout: Layout | None) -> None:
        self._num_members, self._layout = num_members, layout
        self.shapes: dict[Any, None] = {}  # in their order
        self.fault, self._count = "", 0
        self._known: set[Any] = set()

    def __call__(self, batch: PyTree) -> PyTree:
        """The batch, on the device or transferred on first use."""
        leaves, treedef = jax.tree.flatten(batch)
        leaves = [own_array(_as_numpy(x)) for x in leaves]
        key = (treedef, *((type(x), x.shape, x.dtype) if _axes.is_array(x) else None for x in leaves))
        batch = jax.tree.unflatten(treedef, leaves)
        self._count += 1
        if key in self._known:
            if not self.fault and not all(map(_is_finite, leaves)):
                self._note(batch)
            return batch
        converted, _ = on_device(batch, self._num_members, argument="batch", name="fit", layout=self._layout)
        self.shapes[tuple((x.shape, x.dtype) for x in jax.tree.leaves(converted))] = None
        if self._layout is None and jax.tree.structure(converted) == treedef and all(map(_is_simple, leaves)):
            self._known.add(key)
        if not self.fault:
            self._note(converted)
        return converted

    def _note(self, batch: PyTree) -> None:
        text = not_finite_text(batch, argument="batch")
        self.fault = text and f"in batch {self._count} of this run, {text}"


def _as_numpy(x: Any) -> Any:
    """Data frames, and arrays of other frameworks, such as the tensors of a torch loader, as NumPy arrays."""
    x = from_foreign(x, "batch", name="fit")
    return np.asarray(x) if not _axes.is_array(x) and hasattr(x, "__dlpack__") else x


def _is_simple(x: Any) -> bool:
    """Whether the checks of shape and finiteness suffice: 64-bit integers may be too large."""
    if isinstance(x, jax.Array):
        return True
    return type(x) is np.ndarray and (x.dtype.kind in "bf" or (x.dtype.kind in "iu" and x.dtype.itemsize < 8))


def _is_finite(x: Any) -> bool:
    if isinstance(x, jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return True
        if x.dtype != np.float32 or not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices()):
            return is_finite(x)
        x = np.asarray(x)
    if x.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):  # the sum may overflow; then the elements are checked
        return bool(np.isfinite(np.add.reduce(x, axis=None)))


_END = object()
_SAVES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # of grain, of torch


class BatchIterator:
    """One pass over an iterable of batches; the next batch, `waiting`, can be on the device ahead of time."""

    def __init__(self, batches: Iterable[PyTree], convert: Converter, state: Any = None) -> None:
        self._iterator, self._convert = iter(batches), convert
        self._holder, self._names = _with_state(self._iterator, batches)
        if state is not None:
            check_resumable(able=self._holder is not None)
            with explain_state():
                getattr(self._holder, self._names[1])(copy.deepcopy(state))
            if self._holder is not self._iterator:  # a loader resumes with the next iterator that it makes
                self._iterator = iter(batches)
        self.waiting: PyTree = None
        self._drawn = self._over = False
        self._before: Any = None
        self._error: Exception | None = None

    @property
    def state(self) -> Any:
        """The iterator's state after the last batch taken, or just before its end; `None` without checkpointing.

        It is a copy, because an iterator may return its own live state, which the next batch changes.
        """
        if self._holder is None:
            return None
        return self._before if self._drawn else copy.deepcopy(getattr(self._holder, self._names[0])())

    def peek(self) -> PyTree:
        """The next batch on the device, checked; `None` at the end. Raises the error of drawing it."""
        self.draw()
        if self._error is not None:
            raise self._error
        return self.waiting

    def take(self) -> PyTree:
        """The next batch, which is thereby used."""
        batch = self.peek()
        self.waiting, self._drawn = None, self._over
        return batch

    @property
    def has_drawn(self) -> bool:
        """Whether the next batch is drawn; false after the last one, and if drawing it failed."""
        return self._drawn and not self._over and self._error is None

    @property
    def is_over(self) -> bool:
        """Whether the end was found: the last batch is taken, and drawing another one gave none."""
        return self._over

    def pass_over(self) -> bool:
        """Draws a batch without using it. Returns whether there was one."""
        if self._drawn:
            self.peek()
            self.waiting, self._drawn = None, False
            return not self._over
        return next(self._iterator, _END) is not _END

    def draw(self) -> None:
        """Fetches the next batch, if there is one.

        An error is raised only when the batch is taken, because the step on the previous batch is still running.
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
        return self._convert(batch)


def _with_state(*candidates: Any) -> tuple[Any, tuple[str, str]]:
    """The first candidate that supports checkpointing, with the names of its methods."""
    for candidate in candidates:
        for names in _SAVES:
            if all(callable(getattr(candidate, name, None)) for name in names):
                return candidate, names
    return None, ("", "")


def iterate_from(
    cursor: Cursor, iterate: Callable[..., BatchIterator], first: BatchIterator | None = None
) -> BatchIterator:
    """Batches from the cursor on; without checkpointing, they are drawn again from the beginning.

    `first` is an unused pass.
    """
    if cursor.state is not None:
        iterator = iterate(state=cursor.state)
        if cursor.epochs > 0 and cursor.batches == 0:  # saved after an epoch, whose end is counted
            iterator.draw()
        return iterate() if iterator.is_over else iterator
    iterator = iterate() if first is None else first
    for _ in range(cursor.epochs):
        while iterator.pass_over():
            pass
        iterator = iterate()
    for _ in range(cursor.batches - 1):
        iterator.pass_over()
    if cursor.batches > 0:
        check_same_batches(digest_of(iterator.take()), cursor.digest)
    return iterator
