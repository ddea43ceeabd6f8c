import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .. import _axes
from .._caller import caller
from .._check import MemberMismatchError, check_flag, check_sequence, is_traced, kind_text
from .._foreign import from_foreign_tree
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ..tree._engine import check_index
from ._cut import take
from ._ensemble import Ensemble


def part_names(parts: Iterable[Any], taken: Iterable[str] = ()) -> list[str]:
    """A name for each part: the class of its members, with a number if that name is taken."""
    names, before = [], set(taken)
    for part in parts:
        kind = type(part.stacked).__name__
        candidates: Iterator[str] = (kind if i == 1 else f"{kind}_{i}" for i in range(1, len(before) + 2))
        names.append(next(own for own in candidates if own not in before))
        before.add(names[-1])
    return names


_NAME = re.compile(r"\w[\w.-]*")


def check_parts(parts: Any) -> dict[str, Ensemble[Any]]:
    """Raises unless `parts` are ensembles with valid names. Returns them by name, in the given order."""
    if not isinstance(parts, Mapping):
        if isinstance(parts, Ensemble):
            parts = [parts]
        listed = check_sequence(parts, "parts", of="ensembles, or a dict of them")
        parts = dict(zip(part_names(check_each_part(enumerate(listed))), listed, strict=True))
    else:
        check_each_part(parts.items())
        check_part_names(parts)
    if not parts:
        raise ValueError(f"`{caller()}` needs at least one ensemble, got none.")
    return dict(parts)


def check_each_part(parts: Iterable[tuple[Any, Any]]) -> list[Ensemble[Any]]:
    """Raises unless all parts, given with their names or positions, are ensembles. Returns them."""
    values = []
    for where, value in parts:
        values.append(value)
        if isinstance(value, Ensemble):
            continue
        fix = "`group([model, ...])` makes a group of models, `concatenate([group, ...])` of groups."
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], eqx.nn.State):
            fix = "Pass the ensemble alone, and its state to `predict` or `fit`: `state={part: state}`."
        elif isinstance(getattr(value, "ensemble", None), Ensemble):
            fix = "Pass `run.healthy`; or make one run of them with `GroupRun({part: run, ...})`."
        raise TypeError(f"`{caller()}` needs ensembles as its parts, got {kind_text(value)} at {where!r}.\n{fix}")
    return values


def check_part_names(names: Iterable[Any]) -> None:
    """Raises unless all names are strings that can also name folders."""
    for own in names:
        if not isinstance(own, str):
            raise TypeError(f"`{caller()}` needs a string as the name of each part, got {own!r}.")
        if _NAME.fullmatch(own) is None:
            raise ValueError(
                f"`{caller()}` needs names of letters, digits, `_`, `-` and `.` for its parts, got {own!r}: a "
                "checkpoint folder of each part has its name."
            )


_FIX_IDS = "Pass `renumber=True` for the ids 0, 1, 2, ...; or build each part with its own: "


def check_distinct_parts(parts: Mapping[str, Ensemble[Any]], *, fix: str = _FIX_IDS) -> None:
    """Raises if an id occurs in two parts."""
    owner: dict[int, str] = {}
    for own, part in parts.items():
        if part.ids is None or is_traced(part.ids):
            return
        repeated = [i for i in np.asarray(part.ids).tolist() if i in owner]
        if repeated:
            raise ValueError(
                f"`{caller()}` needs members with different ids, because each member's random stream follows from its "
                f"id; the parts `{owner[repeated[0]]}` and `{own}` both have {repeated}.\n"
                f"{fix}`build(make, ids=range(4, 8), key=key)`."
            )
        owner |= dict.fromkeys(np.asarray(part.ids).tolist(), own)


def check_order(order: Any, num_members: int) -> tuple[int, ...]:
    """Raises unless `order` is a permutation of the members of all parts. Returns it."""
    listed = [int(i) for i in check_sequence(order, "order", of="integers")]
    if sorted(listed) != list(range(num_members)):
        raise ValueError(f"`{caller()}` needs `order` to have each of 0 to {num_members - 1} once, got {listed}.")
    return tuple(listed)


def check_order_fits(order: tuple[int, ...], num_members: int) -> None:
    """Raises unless `order` has one entry per member; `equinox.tree_at` may have replaced a part."""
    if len(order) != num_members:
        raise MemberMismatchError(
            f"A `Group` needs an `order` of all its members; its parts have {num_members}, its order {len(order)}.\n"
            "A part of another size makes another group: `Group(group.parts | {name: part})`."
        )


def check_known_part(part: str, parts: Mapping[str, Any]) -> None:
    """Raises unless a part has this name."""
    if part not in parts:
        raise KeyError(f"This `Group` has no part {part!r}; its parts are {', '.join(map(repr, parts))}.")


def check_group_index(index: Any) -> None:
    """Raises for a traced index, which cannot select among members of different architectures, and for a tuple."""
    if isinstance(index, tuple):
        raise TypeError(
            f"A group is indexed along its members only, got {index!r}.\nWrite `group[[0, 1]]` for two members."
        )
    if is_traced(index) or (isinstance(index, Sequence) and any(map(is_traced, index))):
        raise TypeError(
            "A `Group` needs a concrete index: its members are of several architectures, and a compiled program "
            "cannot choose among them.\nIndex a part: `group['name'][index]`."
        )


def check_no_state(args: Any) -> None:
    """Raises if a call of a group is given a state: each part has a different kind of state."""
    is_state = lambda x: isinstance(x, eqx.nn.State)
    if any(map(is_state, jax.tree.leaves(args, is_leaf=is_state))):
        raise TypeError(
            "A call of a `Group` takes no `equinox.nn.State`, because each part has its own kind of state.\n"
            "Call a part, `group['name'](x, state)`, or use `predict(group, x, state={'name': state})`."
        )


def check_member_values(value: Any, num_members: int) -> None:
    """Raises unless all arrays of a value have one entry per member of a group."""
    for x in jax.tree.leaves(value):
        shape = np.shape(x)
        if shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`{caller()}` needs one value per member of the group: expected ({num_members}, ...), got {shape}."
            )


def check_like_outputs(outputs: Mapping[str, Any]) -> None:
    """Raises unless the outputs of all parts agree in structure, dtype, and shape after the `members` axis."""
    (first_name, first), *others = outputs.items()
    for own, output in others:
        expected, got = (_shapes_text(tree) for tree in (first, output))
        if expected != got or jax.tree.structure(first) != jax.tree.structure(output):
            raise MemberMismatchError(
                f"`{caller()}` needs the same shape, structure and dtype from the members of all parts.\n"
                f"  part `{first_name}`: {expected}\n  part `{own}`: {got}\n"
                "Pass a function of a model for each part that returns the same: `predict(group, x, fn={part: lambda "
                "model, x: ...})`."
            )


def _shapes_text(tree: Any) -> str:
    def text(x: Any) -> str:
        if not hasattr(x, "shape"):
            return repr(x)
        return leaf_text(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))

    texts = [text(x) for x in jax.tree.leaves(tree)]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


# The order of a group's members among its parts.


def member_positions(group: "Group") -> dict[str, np.ndarray]:
    """The positions in the group of the members of each part, by its name."""
    of_all, start, positions = np.argsort(np.asarray(group.order)), 0, {}
    sizes = {name: part.num_members for name, part in group.parts.items()}
    check_order_fits(group.order, sum(sizes.values()))
    for name, size in sizes.items():
        positions[name] = of_all[start : start + size]
        start += size
    return positions


def join_members(group: "Group", values: Mapping[str, PyTree]) -> PyTree:
    """Joins the parts' values `(members, ...)` in the order of the group."""
    check_like_outputs(values)
    check_order_fits(group.order, group.num_members)
    return join_values([values[part] for part in group.parts], np.asarray(group.order))


def join_values(values: Sequence[PyTree], order: np.ndarray) -> PyTree:
    """Concatenates trees of arrays `(members, ...)`, and permutes the members by `order`."""
    is_ordered = np.array_equal(order, np.arange(len(order)))
    if len(values) == 1 and is_ordered:
        return values[0]

    def join(*xs: Any) -> Any:
        if not _axes.is_array(xs[0]):
            return xs[0]
        joined = (np if all(isinstance(x, np.ndarray) for x in xs) else jnp).concatenate(xs)
        return joined if is_ordered else joined[order]

    return jax.tree.map(join, *values)


class Group(_axes.AbstractParts):
    """Ensembles of different architectures with a joint `members` axis.

    **Arguments:**

    - `parts`: a dict from names to ensembles; or a list of ensembles, which are named after the class of their members.
        A name consists of letters, digits, `_`, `-` and `.`.
    - `order`: member `i` is number `order[i]` of the members of all `parts`; by default part after part.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs, which must all be different.

    **Attributes:**

    - `parts`: the ensembles by name, in alphabetical order.
    - `order`: the order of the members.

    **Raises:** `ValueError` for equal ids without `renumber`, an invalid name or `order`, and no parts; `TypeError` for
    parts that are not ensembles.

    ```python
    wide = ee.build(lambda key: eqx.nn.MLP(3, 1, 64, 1, key=key), 4, key=key)
    linear = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key)
    group = ee.Group({"wide": wide, "linear": linear}, renumber=True)
    group(jnp.ones(3)).shape  # (6, 1): one input for all members
    ee.predict(group, jnp.ones((100, 3))).shape  # (6, 100, 1)
    group[5], group["wide"], group[[0, 5]]  # a model, an Ensemble, a smaller group
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
        given = check_parts(parts)
        check_flag(renumber, "renumber")
        self.parts = {own: given[own] for own in sorted(given)}  # the order in which JAX flattens a dict
        sizes = {own: part.num_members for own, part in self.parts.items()}
        if order is None:
            ends = dict(zip(sizes, np.cumsum([*sizes.values()]).tolist(), strict=True))
            self.order = tuple(i for own in given for i in range(ends[own] - sizes[own], ends[own]))
        else:
            self.order = check_order(order, sum(sizes.values()))
        if renumber:
            ids = {own: jnp.asarray(i, jnp.int32) for own, i in member_positions(self).items()}
            self.parts = {own: Ensemble(part.stacked, part.shared, ids[own]) for own, part in self.parts.items()}
        check_distinct_parts(self.parts)

    @property
    def num_members(self) -> int:
        """The number of members of all parts."""
        count = sum(part.num_members for part in self.parts.values())
        check_order_fits(self.order, count)
        return count

    @property
    def ids(self) -> Int[Array, " members"]:
        """The ids of the members `(members,)`, in their order."""
        return join_members(self, {name: jnp.asarray(part.ids) for name, part in self.parts.items()})

    def __pdoc__(self, **_: Any) -> Any:
        """The short form, in one line."""
        from wadler_lindig import TextDoc

        return TextDoc(f"Group({', '.join(f'{name}={part!r}' for name, part in self.parts.items())})")

    def __len__(self) -> int:
        return self.num_members

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member, as [`eqx_ensemble.Ensemble`][] does; all parts must return arrays of one shape.

        For one key per member pass `Each(member_keys(key, group.ids, purpose="call"))`.
        """
        given = from_foreign_tree((args, kwargs), "args")
        check_no_state(given)
        _axes.map_each(lambda value: check_member_values(value, self.num_members), given)
        outputs = {}
        for part, positions in member_positions(self).items():
            own_args, own_kwargs = take(given, positions)
            outputs[part] = self.parts[part](*own_args, **own_kwargs)
        return join_members(self, outputs)

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
        rows = check_index(index, self.num_members)
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
