"""Splits the arguments of a group by part."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import _axes
from .. import tree as _tree
from .._check import MemberMismatchError, kind_text
from .._pytree import PyTree
from ._group import Group, check_member_values, member_positions


def by_part(value: Any, names: Mapping[str, Any], argument: str, *, name: str) -> dict[str, Any]:
    """The value for each part: looked up by name in a dict, otherwise the same for all.

    Only for arguments that are not dicts themselves.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    unknown, missing = [own for own in value if own not in names], [own for own in names if own not in value]
    if unknown or missing:
        wrong = f"there is no part {unknown[0]!r}" if unknown else f"there is none for {', '.join(map(repr, missing))}"
        raise ValueError(
            f"`{name}` needs `{argument}` for every part of the group, {', '.join(map(repr, names))}; {wrong}."
        )
    return {own: value[own] for own in names}


def tree_by_part(value: Any, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """The trees of all parts, if `value` is a dict whose keys are their names."""
    return {own: value[own] for own in names} if isinstance(value, dict) and set(value) == set(names) else None


def states_by_part(states: Any, names: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """The state of each part, `None` if none is given."""
    if states is None:
        return dict.fromkeys(names)
    if not isinstance(states, Mapping) or not set(states) <= set(names):
        got = f"keys {sorted(map(str, states))}" if isinstance(states, Mapping) else kind_text(states)
        raise TypeError(
            f"`{name}` needs the `state` of a group as a dict from the names of its stateful parts to their states; "
            f"the parts are {', '.join(map(repr, names))}, got {got}."
        )
    return {own: states.get(own) for own in names}


def data_by_part(group: Group, data: PyTree, *, name: str) -> dict[str, Any]:
    """The data of each part; an `Each` has one value per member of the group."""
    own = tree_by_part(data, group.parts)
    if own is not None:
        return own
    _axes.map_each(lambda value: check_member_values(value, group.num_members, name=name), data)
    take = lambda positions: _axes.map_each(lambda value: _axes.Each(_tree.take(value, positions)), data)
    return {part: take(positions) for part, positions in member_positions(group).items()}


def members_by_part(group: Group, value: PyTree, argument: str, *, name: str) -> dict[str, Any]:
    """Splits a tree of arrays `(members, ...)` by part; a dict of such trees by part is used directly."""
    own = tree_by_part(value, group.parts)
    if own is not None or value is None:
        return dict.fromkeys(group.parts) if own is None else own
    with _explain_argument(argument, name):
        check_member_values(value, group.num_members, name=name)
    return {part: _tree.take(value, positions) for part, positions in member_positions(group).items()}


def numbers_by_part(group: Group, value: Any, argument: str, *, name: str) -> dict[str, Any]:
    """Splits a scalar, one value per member `(members,)`, or a dict of these, by part."""
    if isinstance(value, Mapping) or value is None or np.ndim(value) == 0:
        return by_part(value, group.parts, argument, name=name)
    return members_by_part(group, np.asarray(value), argument, name=name)


@contextlib.contextmanager
def _explain_argument(argument: str, name: str) -> Iterator[None]:
    try:
        yield
    except MemberMismatchError as error:
        error.add_note(f"It is the argument `{argument}` of `{name}`.")
        raise


@contextlib.contextmanager
def explain_part(part: str) -> Iterator[None]:
    """Adds the name of a part of a group to an error raised in it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised for part `{part}` of the group.")
        raise
