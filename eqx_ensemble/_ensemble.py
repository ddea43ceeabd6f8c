from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import numpy as np

from ._check import MemberMismatchError, is_key
from ._pytree import PyTree

M = TypeVar("M")

_is_none = lambda x: x is None


class Ensemble(eqx.Module, Generic[M]):
    """Many models of one architecture as one Module, whose arrays have a leading `members` axis.

    `stacked` is an ordinary Module, as `equinox.filter_vmap(make)(keys)` returns it: transformations, optimisers and
    `equinox.tree_at` work on it as on any other.

    **Attributes:**

    - `stacked`: the members, each array `(members, ...)`, except for the arrays that they share.
    - `axes`: the axis of the members in each leaf of `stacked`: 0, and `None` for shared arrays and what is no array.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key), 8, key=key)
    ensemble(jnp.ones(13)).shape  # (8, 1): every member sees the same input
    ensemble(ee.Each(jnp.ones((8, 13)))).shape  # (8, 1): one input per member
    ensemble(ee.Batch(jnp.ones((32, 13)))).shape  # (8, 32, 1): members, batch, out
    ensemble[3]  # an ordinary eqx.nn.MLP
    ensemble[[0, 5]], ensemble[2:]  # smaller ensembles
    ```
    """

    stacked: M
    # Of each leaf, `None` included: filtering a tree replaces leaves by `None`, and keeps their number.
    axes: tuple[int | None, ...] = eqx.field(static=True)

    def __init__(self, stacked: M, axes: tuple[int | None, ...] | None = None) -> None:
        leaves = jax.tree.leaves(stacked, is_leaf=_is_none)
        self.stacked = stacked
        self.axes = tuple(0 if eqx.is_array(x) else None for x in leaves) if axes is None else axes
        sizes: dict[Any, str] = {}
        for (path, x), axis in zip(
            jax.tree_util.tree_flatten_with_path(stacked, is_leaf=_is_none)[0], self.axes, strict=True
        ):
            if is_key(x) and str(jax.random.key_impl(x)) != "threefry2x32":
                raise TypeError(
                    f"Members need threefry keys; at `{jax.tree_util.keystr(path)}`: a key of "
                    f"{str(jax.random.key_impl(x))!r}, which draws differently under `jax.vmap`.\n"
                    "Use `jax.random.key(seed, impl='threefry2x32')`."
                )
            if axis == 0 and eqx.is_array(x):
                sizes.setdefault(x.shape[:1], f"`{jax.tree_util.keystr(path)}`: {x.shape}")
        if len(sizes) != 1 or () in sizes:
            found = ", ".join(sizes.values()) or "no array"
            raise MemberMismatchError(
                f"`Ensemble` needs arrays `(members, ...)` with one number of members; got {found}.\n"
                "`stack([model, ...])` makes an ensemble of models; `from_stacked(model, shared=...)` leaves some of "
                "their arrays without the axis."
            )

    def in_axes(self) -> "Ensemble[M]":
        """`axes` as a tree like the ensemble, for `in_axes` of `equinox.filter_vmap`."""
        leaves, treedef = jax.tree.flatten(self, is_leaf=_is_none)
        return jax.tree.unflatten(
            treedef, [None if x is None else axis for x, axis in zip(leaves, self.axes, strict=True)]
        )

    @property
    def num_members(self) -> int:
        """The number of members."""
        leaves = zip(jax.tree.leaves(self.stacked, is_leaf=_is_none), self.axes, strict=True)
        sizes = {np.shape(x)[:1] for x, axis in leaves if axis == 0 and x is not None}
        if len(sizes) != 1 or () in sizes:
            raise MemberMismatchError(
                "An `Ensemble` inside `jax.vmap` or `jax.lax.scan` is sliced along its members, and is no ensemble.\n"
                "Write `map_members(fn)(ensemble, x)`: there `fn` gets the model of one member."
            )
        return next(iter(sizes))[0]

    def __len__(self) -> int:
        return self.num_members

    def __pdoc__(self, **_: Any) -> Any:
        """The short form; print `stacked` for all leaves."""
        from wadler_lindig import TextDoc

        sizes = {x.shape[:1] for x in jax.tree.leaves(self.stacked) if eqx.is_array(x)}
        count = f"num_members={sizes.pop()[0]}" if len(sizes) == 1 and () not in sizes else "..."
        return TextDoc(f"Ensemble[{type(self.stacked).__name__}]({count})")

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(...)` in, `(members, ...)` out.

        Every member sees the same example, unless the input is marked [`eqx_ensemble.Each`][] or
        [`eqx_ensemble.Batch`][]. An `equinox.nn.State` has one value per member.
        """
        from ._map import call_members

        return call_members(self, *args, **kwargs)

    @overload
    def __getitem__(self, index: int | np.integer) -> M: ...
    @overload
    def __getitem__(self, index: Any) -> "Ensemble[M]": ...
    def __getitem__(self, index: Any) -> "M | Ensemble[M]":
        """One member for an integer; a smaller ensemble for a slice, a list of integers or a mask."""
        from ._members import take

        taken = take(self, index)
        return taken.stacked if np.ndim(index) == 0 and not isinstance(index, slice) else taken

    def __iter__(self) -> Iterator[M]:
        return (self[i] for i in range(self.num_members))

    def unstack(self) -> list[M]:
        """The members as a list of ordinary models."""
        return list(self)
