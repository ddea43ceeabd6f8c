import dataclasses
import html
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.tree_util as jtu

from ._check import is_member_array, kind_text
from ._ensemble import Ensemble
from ._leaf_text import leaf_text
from ._predict import bytes_text
from ._progress import members_in_words
from ._pytree import PyTree
from .train._engine import Run, Trainable, TrainState, split_trainable

_HEADS = ("part", "leaf", "shape", "dtype", "kind", "trainable", "bytes")


class LeafDescription(NamedTuple):
    """One leaf, a row of [`eqx_ensemble.Description`][].

    **Attributes:**

    - `part`: the tree that it belongs to: `"model"`, or of a training state `"state"`, `"optimiser"` or `"hyper"`.
    - `path`: its path, such as `.layers[0].weight`.
    - `shape`, `dtype`: its shape in one member, and the name of its dtype; `None` if it is not an array.
    - `kind`: `"stacked"`, one value per member; `"shared"`, an array that all members use; `"static"`, no array.
    - `trainable`: whether it is trained by gradients.
    - `bytes`: its size over all members, not counting copies on several devices.
    - `value`: a short text for a leaf that is not an array.
    """

    part: str
    path: str
    shape: tuple[int, ...] | None
    dtype: str | None
    kind: Literal["stacked", "shared", "static"]
    trainable: bool
    bytes: int
    value: str | None


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """The leaves of an ensemble; prints as a table with totals, also in a notebook.

    **Attributes:**

    - `rows`: one [`eqx_ensemble.LeafDescription`][] per leaf, in the order of the tree;
        `pandas.DataFrame(description.rows)` is the same table.
    - `num_members`: the number of members.
    - `title`: the first line of the table.
    """

    rows: list[LeafDescription]
    num_members: int
    title: str

    @property
    def num_trainable(self) -> int:
        """The number of trainable parameters of one member."""
        return sum(math.prod(row.shape or ()) for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        last = len(widths) - 1
        lines = [
            "  ".join(cell.rjust(width) if i == last else cell.ljust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in table)
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines), self._totals()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        cells = lambda row, tag: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{cells(head, 'th')}</tr></thead>"
            f"<tbody>{body}</tbody>"
            f"<tfoot><tr><td colspan={len(head)}>{html.escape(self._totals())}</td></tr></tfoot></table>"
        )

    def _table(self) -> list[tuple[str, ...]]:
        """Heads and cells; the part is shown if the tree has several."""
        several = len({row.part for row in self.rows}) > 1
        return [row if several else row[1:] for row in (_HEADS, *map(_cells, self.rows))]

    def _totals(self) -> str:
        sizes = {kind: sum(row.bytes for row in self.rows if row.kind == kind) for kind in ("stacked", "shared")}
        return (
            f"{members_in_words(self.num_members)}, each with {self.num_trainable:,} trainable numbers; "
            f"{bytes_text(self.bytes)}: {bytes_text(sizes['stacked'])} stacked, {bytes_text(sizes['shared'])} shared"
        )


def describe(
    ensemble: Ensemble[Any] | TrainState[Any] | Run[Any], *, trainable: Trainable = eqx.is_inexact_array
) -> Description:
    """Describes every leaf: its shape in one member, whether it is stacked or shared, and trainable, and its size.

    **Arguments:**

    - `ensemble`: an ensemble; or a training state or a run, with its optimiser state, hyper-parameters and
        `equinox.nn.State`.
    - `trainable`: the leaves to train, as for [`eqx_ensemble.fit`][]; for an ensemble only.

    **Returns:** [`eqx_ensemble.Description`][].

    **Raises:** `TypeError` for anything else, and for `trainable` with a training state or a run.

    ```python
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ensemble = ee.build(make, 8, shared=lambda model: model.layers[0], key=key)
    description = ee.describe(ensemble)
    print(description)
    description.num_trainable, description.bytes  # 2601, 86032
    ```
    """
    if isinstance(ensemble, Ensemble):
        params, frozen = split_trainable(ensemble, trainable)
        rows = [*_model_rows(params, frozen, ensemble.shared)]
        return Description(rows, ensemble.num_members, f"Ensemble of {_kind(ensemble)}")
    state = ensemble.train_state if isinstance(ensemble, Run) else ensemble
    if not isinstance(state, TrainState):
        raise TypeError(
            f"`describe` needs an `Ensemble`, a `train.TrainState` or a `Run`, got {kind_text(ensemble)}.\n"
            "To see a single model: `equinox.tree_pformat(model)`."
        )
    if trainable is not eqx.is_inexact_array:
        raise TypeError("`describe` takes `trainable` with an ensemble; a training state knows what it trains.")
    rows = [*_model_rows(state.params, state.fixed.frozen, state.shared)]
    parts = {"state": state.model_state, "optimiser": state.opt_state, "hyper": state.hyper}
    rows += [row for part, tree in parts.items() for row in _stacked_rows(tree, part)]
    return Description(rows, state.num_members, f"{type(ensemble).__name__} of {_kind(state)}")


def _kind(tree: Any) -> str:
    """The class of the members."""
    return type(tree.stacked if isinstance(tree, Ensemble) else tree.shared).__name__


def _model_rows(params: PyTree, frozen: PyTree, shared: PyTree) -> Iterator[LeafDescription]:
    """The leaves of a model, in its own order."""
    trained = {path for path, _ in jtu.tree_flatten_with_path(params)[0]}
    stacked = trained | {path for path, _ in jtu.tree_flatten_with_path(frozen)[0]}
    for path, leaf in jtu.tree_flatten_with_path(eqx.combine(params, frozen, shared))[0]:
        yield _row("model", path, leaf, stacked=path in stacked, trainable=path in trained)


def _stacked_rows(tree: PyTree, part: str) -> Iterator[LeafDescription]:
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        yield _row(part, path, leaf, stacked=True, trainable=False)


def _row(part: str, path: tuple, leaf: Any, *, stacked: bool, trainable: bool) -> LeafDescription:
    name = jtu.keystr(path) or "<root>"
    if not (is_member_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
        return LeafDescription(part, name, None, None, "static", trainable, 0, _text(leaf))
    shape, size = tuple(leaf.shape[1:] if stacked else leaf.shape), leaf.size * leaf.dtype.itemsize
    return LeafDescription(
        part, name, shape, str(leaf.dtype), "stacked" if stacked else "shared", trainable, size, None
    )


def _text(leaf: Any) -> str:
    """A function's name, or a short text of anything else."""
    name = getattr(leaf, "__name__", None)
    return name if callable(leaf) and isinstance(name, str) else leaf_text(leaf)


def _cells(row: LeafDescription) -> tuple[str, ...]:
    shape, dtype = ("", row.value or "") if row.shape is None else (str(row.shape), str(row.dtype))
    size = "" if row.shape is None else f"{row.bytes:,}"
    return row.part, row.path, shape, dtype, row.kind, "yes" if row.trainable else "no", size
