import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import equinox as eqx
import numpy as np

from .. import _axes
from .. import tree as _tree
from .._caller import caller
from .._check import (
    MemberMismatchError,
    check_flag,
    check_integer_ids,
    check_sequence,
    check_weight_count,
    is_traced,
    kind_text,
)
from .._keys import check_distinct_ids
from .._pytree import PyTree
from ..tree._engine import combine_trees
from ._check import check_ensemble, check_equal_members
from ._cut import ids_of, join, take, with_ids
from ._ensemble import Ensemble, M, one_alone
from ._group import Group, check_member_values, member_positions, part_names

# Splits the arguments of a group by part.


def by_part(value: Any, names: Mapping[str, Any], argument: str) -> dict[str, Any]:
    """The value for each part: looked up by name in a dict, otherwise the same for all.

    Only for arguments that are not dicts themselves.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    unknown, missing = [own for own in value if own not in names], [own for own in names if own not in value]
    if unknown or missing:
        wrong = f"there is no part {unknown[0]!r}" if unknown else f"there is none for {', '.join(map(repr, missing))}"
        raise ValueError(
            f"`{caller()}` needs `{argument}` for every part of the group, {', '.join(map(repr, names))}; {wrong}."
        )
    return {own: value[own] for own in names}


def tree_by_part(value: Any, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """The trees of all parts, if `value` is a dict whose keys are their names."""
    return {own: value[own] for own in names} if isinstance(value, dict) and set(value) == set(names) else None


def states_by_part(states: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each part, `None` if none is given."""
    if states is None:
        return dict.fromkeys(names)
    if not isinstance(states, Mapping) or not set(states) <= set(names):
        got = f"keys {sorted(map(str, states))}" if isinstance(states, Mapping) else kind_text(states)
        raise TypeError(
            f"`{caller()}` needs the `state` of a group as a dict from the names of its stateful parts to their "
            f"states; the parts are {', '.join(map(repr, names))}, got {got}."
        )
    return {own: states.get(own) for own in names}


def data_by_part(group: Group, data: PyTree) -> dict[str, Any]:
    """The data of each part; an `Each` has one value per member of the group."""
    own = tree_by_part(data, group.parts)
    if own is not None:
        return own
    _axes.map_each(lambda value: check_member_values(value, group.num_members), data)
    return {part: take(data, positions) for part, positions in member_positions(group).items()}


def members_by_part(group: Group, value: PyTree, argument: str) -> dict[str, Any]:
    """Splits a tree of arrays `(members, ...)` by part; a dict of such trees by part is used directly."""
    own = tree_by_part(value, group.parts)
    if own is not None or value is None:
        return dict.fromkeys(group.parts) if own is None else own
    with _explain_argument(argument):
        check_member_values(value, group.num_members)
    return {part: _tree.take(value, positions) for part, positions in member_positions(group).items()}


@contextlib.contextmanager
def _explain_argument(argument: str) -> Iterator[None]:
    try:
        yield
    except MemberMismatchError as error:
        error.add_note(f"It is the argument `{argument}` of `{caller()}`.")
        raise


@contextlib.contextmanager
def explain_part(part: str) -> Iterator[None]:
    """Adds the name of a part of a group to an error raised in it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised for part `{part}` of the group.")
        raise


def average_parameters(ensemble: Ensemble[M], weights: Any = None) -> M:
    """Averages the members' weights into one model (a model soup).

    Floating-point arrays are averaged in at least float32; other arrays must be equal in all members.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: `(members,)`, normalised by their sum; uniform if not given.

    **Returns:** one ordinary model.

    **Raises:** `ValueError` for a wrong number of weights, or weights that are not finite or sum to 0;
    `MemberMismatchError` if other arrays differ between members; `TypeError` for a group or another type.

    ??? cite
        [Model soups](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    check_ensemble(ensemble)
    check_weight_count(weights, ensemble.num_members)
    inexact, exact = eqx.partition(ensemble.arrays, eqx.is_inexact_array)
    check_equal_members(exact)
    kept, _ = _tree.take((exact, ensemble.ids), 0)
    members = [part for part, _ in _tree.unstack((inexact, ensemble.ids))]
    mean = combine_trees(members, weights, mean=True)
    return one_alone(eqx.combine(mean, kept), ensemble.shared)


def check_alike(values: Any) -> list[Any]:
    """Raises unless `values` are ensembles or groups, or all runs, or all training states. Returns them as a list."""
    single = isinstance(values, Group | Ensemble)
    values = [values] if single else check_sequence(values, "ensembles", of="ensembles")
    if not values:
        raise ValueError(f"`{caller()}` needs at least one ensemble, got none.")
    is_other = not isinstance(values[0], Ensemble) and ids_of(values[0]) is not None
    kind: Any = type(values[0]) if is_other else Ensemble | Group
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            wanted = f"`{kind.__name__}` only" if is_other else "ensembles"
            raise TypeError(
                f"`{caller()}` needs {wanted}, got {kind_text(value)} at position {i}.\n"
                "Make an ensemble of models with `stack([model, ...])`."
            )
        if isinstance(value, Ensemble):
            check_integer_ids(value.ids)
    return values


@runtime_checkable
class Trained(Protocol):
    """A run or a training state."""

    @property
    def ensemble(self) -> Ensemble[Any]: ...


R = TypeVar("R", bound=Trained)


@overload
def concatenate(ensembles: Iterable[Ensemble[M]], *, renumber: bool = False) -> Ensemble[M]: ...
@overload
def concatenate(ensembles: Iterable[Ensemble[M] | Group], *, renumber: bool = False) -> Group: ...
@overload
def concatenate(ensembles: Iterable[R], *, renumber: bool = False) -> R: ...
def concatenate(ensembles: Iterable[Any], *, renumber: bool = False) -> Any:
    """Concatenates ensembles of one architecture, groups, runs or training states, in the order given.

    **Arguments:**

    - `ensembles`: ensembles or groups, runs or training states. What members share must be equal: shared leaves, the
        step, the plan, the steps of the curves.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs.

    **Returns:** the same type; of ensembles and groups a group, in which parts with the same name are concatenated.

    **Raises:** `ValueError` if two members have the same id and `renumber` is not set, or if there is no ensemble;
    `MemberMismatchError` if the ensembles do not fit together; `TypeError` for anything else.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    old = ee.build(make, 4, key=key)
    new = ee.build(make, ids=[4, 5], key=key)
    ee.concatenate([old, new])  # the same members as ee.build(make, 6, key=key)
    ```
    """
    listed = check_alike(ensembles)
    check_flag(renumber, "renumber")
    if any(isinstance(one, Group) for one in listed):
        return _of_groups(listed, renumber=renumber)
    return _of_members(listed, renumber=renumber)


def _of_members(listed: list[Any], *, renumber: bool) -> Any:
    ids = [ids_of(one) for one in listed]
    if renumber:
        ends = np.cumsum([len(own) for own in ids])
        listed = [
            with_ids(one, np.arange(end - len(own), end)) for one, own, end in zip(listed, ids, ends, strict=True)
        ]
    elif not any(map(is_traced, ids)):
        fix = "Build new members with `build(make, ids=..., key=key)`, or pass `renumber=True`."
        check_distinct_ids(np.concatenate([np.asarray(own) for own in ids]), fix)
    return join(listed)


def _of_groups(listed: list[Ensemble[Any] | Group], *, renumber: bool) -> Group:
    """Concatenates parts with the same name; `positions` are those of their members in the result."""
    parts: dict[str, list[Ensemble[Any]]] = {name: [] for one in listed if isinstance(one, Group) for name in one.parts}
    positions: dict[str, list[np.ndarray]] = {name: [] for name in parts}
    start = 0
    for one in listed:
        if isinstance(one, Group):
            own = {name: (part, member_positions(one)[name]) for name, part in one.parts.items()}
        else:
            own = {part_names([one], taken=parts)[0]: (one, np.arange(one.num_members))}
        for name, (part, of_part) in own.items():
            parts.setdefault(name, []).append(part)
            positions.setdefault(name, []).append(start + of_part)
        start += one.num_members
    order = np.argsort(np.concatenate([x for name in sorted(positions) for x in positions[name]])).tolist()
    joined = {name: _of_part(name, own, renumber=renumber) for name, own in parts.items()}
    return Group(joined, order=order, renumber=renumber)


def _of_part(part: str, ensembles: list[Ensemble[Any]], *, renumber: bool) -> Ensemble[Any]:
    try:
        return _of_members(ensembles, renumber=renumber)
    except MemberMismatchError as error:
        error.add_note(f"Both groups have a part `{part}`, and parts of one name become one ensemble.")
        raise
