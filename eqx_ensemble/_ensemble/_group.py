from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .. import _axes
from .. import tree as _tree
from .._check import check_flag
from .._foreign import from_foreign_tree
from .._pytree import PyTree
from ..tree._check import check_index
from ._check_group import (
    check_distinct_parts,
    check_group_index,
    check_known_part,
    check_member_values,
    check_no_state,
    check_order,
    check_order_fits,
    check_parts,
    group_text,
)
from ._ensemble import Ensemble
from ._group_order import join_members, member_positions


class Group(_axes.AbstractParts):
    """Ensembles of different architectures with a joint `members` axis.

    Each part is an [`eqx_ensemble.Ensemble`][] of models of one architecture. [`eqx_ensemble.predict`][] returns the
    predictions of all members along this axis, to which `combine`, `scores`, `uncertainty`, `calibrate` and `conformal`
    apply unchanged; [`eqx_ensemble.fit`][] trains one part after another. For a list of models see
    [`eqx_ensemble.group`][].

    **Arguments:**

    - `parts`: a dict from names to ensembles; or a list of ensembles, which are named after the class of their members.
        A name consists of letters, digits, `_`, `-` and `.`.
    - `order`: the order of the members, as below; by default those of the first part come first.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs, which must all be different.

    **Attributes:**

    - `parts`: the ensembles by name, in alphabetical order.
    - `order`: member `i` of the group is number `order[i]` of the members of all `parts`, one part after another.

    **Raises:** `ValueError` for members with equal ids unless `renumber` is set, for an invalid name or `order`, and if
    there are no parts; `TypeError` for parts that are not ensembles.

    ```python
    wide = ee.build(lambda key: eqx.nn.MLP(3, 1, 64, 1, key=key), 4, key=key)
    linear = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key)
    group = ee.Group({"wide": wide, "linear": linear}, renumber=True)
    group(jnp.ones(3)).shape  # (6, 1): one input for all members
    ee.predict(group, jnp.ones((100, 3))).shape  # (6, 100, 1)
    group[5], group["wide"]  # a Linear, an Ensemble
    group[[0, 5]]  # a group of two members
    ```
    """

    parts: dict[str, Ensemble[Any]]
    order: tuple[int, ...]

    def __init__(
        self,
        parts: Mapping[str, Ensemble[Any]] | Iterable[Ensemble[Any]],
        *,
        order: Sequence[int] | None = None,
        renumber: bool = False,
    ) -> None:
        name = "Group"
        given = check_parts(parts, name=name)
        check_flag(renumber, "renumber", name=name)
        self.parts = {own: given[own] for own in sorted(given)}  # the order in which JAX flattens a dict
        sizes = {own: part.num_members for own, part in self.parts.items()}
        if order is None:
            ends = dict(zip(sizes, np.cumsum([*sizes.values()]).tolist(), strict=True))
            self.order = tuple(i for own in given for i in range(ends[own] - sizes[own], ends[own]))
        else:
            self.order = check_order(order, sum(sizes.values()), name=name)
        if renumber:
            ids = {own: jnp.asarray(i, jnp.int32) for own, i in member_positions(self).items()}
            self.parts = {own: Ensemble(part.stacked, part.shared, ids[own]) for own, part in self.parts.items()}
        check_distinct_parts(self.parts, name=name)

    @property
    def num_members(self) -> int:
        """The number of members of all parts."""
        count = sum(part.num_members for part in self.parts.values())
        check_order_fits(self.order, count)
        return count

    @property
    def ids(self) -> Int[Array, " members"]:
        """The ids of the members `(members,)`, in their order."""
        return join_members(self, {name: jnp.asarray(part.ids) for name, part in self.parts.items()}, name="Group")

    def __pdoc__(self, **_: Any) -> Any:
        """The short form, in one line."""
        from wadler_lindig import TextDoc

        return TextDoc(group_text(self))

    def __len__(self) -> int:
        return self.num_members

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(…)` in, `(members, …)` out, if all parts return arrays of one shape.

        Inputs are shared by all members unless marked [`eqx_ensemble.Each`][], with one value for each member of the
        group; [`eqx_ensemble.Batch`][] marks many examples. For one key per member pass
        `Each(member_keys(key, group.ids, purpose="call"))`.
        """
        name = "Group.__call__"
        given = from_foreign_tree((args, kwargs), "args", name=name)
        check_no_state(given)
        own = lambda i: _axes.map_each(lambda value: _axes.Each(_tree.take(value, i)), given)
        _axes.map_each(lambda value: check_member_values(value, self.num_members, name=name), given)
        outputs = {}
        for part, positions in member_positions(self).items():
            own_args, own_kwargs = own(positions)
            outputs[part] = self.parts[part](*own_args, **own_kwargs)
        return join_members(self, outputs, name=name)

    @overload
    def __getitem__(self, index: str) -> Ensemble[Any]: ...
    @overload
    def __getitem__(self, index: int | np.integer) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | np.ndarray | Array) -> "Group": ...
    def __getitem__(self, index: Any) -> Any:
        """A part for its name; a model for an integer; a smaller group for a slice, a list of integers or a mask."""
        if isinstance(index, str):
            check_known_part(index, self.parts)
            return self.parts[index]
        check_group_index(index)
        rows = check_index(index, self.num_members, name="Group.__getitem__")
        chosen = np.asarray(self.order)[rows]
        parts, positions, start = {}, [], 0
        for name, part in self.parts.items():
            own = chosen - start
            mine = (own >= 0) & (own < part.num_members)
            start += part.num_members
            if np.ndim(rows) == 0 and mine:
                return part[int(own)]
            if np.any(mine):
                parts[name] = part[own[mine]]
                positions.append(np.flatnonzero(mine))
        return Group(parts, order=np.argsort(np.concatenate(positions)).tolist())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unstack())

    def unstack(self) -> list[Any]:
        """The members as a list of ordinary models, in their order."""
        models = [model for part in self.parts.values() for model in part.unstack()]
        return [models[i] for i in self.order]
