from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._axes._check_rows import is_finite, not_finite_text
from ..._foreign import from_foreign, own_array
from ..._pytree import PyTree
from ...sharding._layout import Layout
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
