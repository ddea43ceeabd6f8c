import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np

from .._check import MemberMismatchError, check_sequence, is_traced, kind_text
from .._leaf_text import leaf_text
from ._ensemble import Ensemble
from ._part_names import part_names

if TYPE_CHECKING:
    from ._group import Group

_NAME = re.compile(r"\w[\w.-]*")


def check_parts(parts: Any, *, name: str) -> dict[str, Ensemble[Any]]:
    """Raises unless `parts` are ensembles with valid names. Returns them by name, in the given order."""
    if not isinstance(parts, Mapping):
        if isinstance(parts, Ensemble):
            parts = [parts]
        listed = check_sequence(parts, "parts", name=name, of="ensembles, or a dict of them")
        parts = dict(zip(part_names(check_each_part(enumerate(listed), name=name)), listed, strict=True))
    else:
        check_each_part(parts.items(), name=name)
        check_part_names(parts, name=name)
    if not parts:
        raise ValueError(f"`{name}` needs at least one ensemble, got none.")
    return dict(parts)


def check_each_part(parts: Iterable[tuple[Any, Any]], *, name: str) -> list[Ensemble[Any]]:
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
        raise TypeError(f"`{name}` needs ensembles as its parts, got {kind_text(value)} at {where!r}.\n{fix}")
    return values


def check_part_names(names: Iterable[Any], *, name: str) -> None:
    """Raises unless all names are strings that can also name folders."""
    for own in names:
        if not isinstance(own, str):
            raise TypeError(f"`{name}` needs a string as the name of each part, got {own!r}.")
        if _NAME.fullmatch(own) is None:
            raise ValueError(
                f"`{name}` needs names of letters, digits, `_`, `-` and `.` for its parts, got {own!r}: a checkpoint "
                "folder of each part has its name."
            )


_FIX_IDS = "Pass `renumber=True` for the ids 0, 1, 2, ...; or build each part with its own: "


def check_distinct_parts(parts: Mapping[str, Ensemble[Any]], *, name: str, fix: str = _FIX_IDS) -> None:
    """Raises if an id occurs in two parts."""
    owner: dict[int, str] = {}
    for own, part in parts.items():
        if part.ids is None or is_traced(part.ids):
            return
        repeated = [i for i in np.asarray(part.ids).tolist() if i in owner]
        if repeated:
            raise ValueError(
                f"`{name}` needs members with different ids, because each member's random stream follows from its id; "
                f"the parts `{owner[repeated[0]]}` and `{own}` both have {repeated}.\n"
                f"{fix}`build(make, ids=range(4, 8), key=key)`."
            )
        owner |= dict.fromkeys(np.asarray(part.ids).tolist(), own)


def check_order(order: Any, num_members: int, *, name: str) -> tuple[int, ...]:
    """Raises unless `order` is a permutation of the members of all parts. Returns it."""
    listed = [int(i) for i in check_sequence(order, "order", name=name, of="integers")]
    if sorted(listed) != list(range(num_members)):
        raise ValueError(f"`{name}` needs `order` to have each of 0 to {num_members - 1} once, got {listed}.")
    return tuple(listed)


def check_order_fits(order: tuple[int, ...], num_members: int) -> None:
    """Raises unless `order` has one entry per member; `equinox.tree_at` may have replaced a part."""
    if len(order) != num_members:
        raise MemberMismatchError(
            f"A `Group` needs an `order` of all its members; its parts have {num_members}, its order {len(order)}.\n"
            "A part of another size makes another group: `Group(group.parts | {name: part})`."
        )


def check_known_part(name: str, parts: Mapping[str, Any]) -> None:
    """Raises unless a part has this name."""
    if name not in parts:
        raise KeyError(f"This `Group` has no part {name!r}; its parts are {', '.join(map(repr, parts))}.")


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


def check_member_values(value: Any, num_members: int, *, name: str) -> None:
    """Raises unless all arrays of a value have one entry per member of a group."""
    for x in jax.tree.leaves(value):
        shape = np.shape(x)
        if shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`{name}` needs one value per member of the group: expected ({num_members}, ...), got {shape}."
            )


def check_like_outputs(outputs: Mapping[str, Any], *, name: str) -> None:
    """Raises unless the outputs of all parts agree in structure, dtype, and shape after the `members` axis."""
    (first_name, first), *others = outputs.items()
    for own, output in others:
        expected, got = (_shapes_text(tree) for tree in (first, output))
        if expected != got or jax.tree.structure(first) != jax.tree.structure(output):
            raise MemberMismatchError(
                f"`{name}` needs the same shape, structure and dtype from the members of all parts.\n"
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


def group_text(group: "Group") -> str:
    """`Group(cnn=Ensemble[Conv](num_members=4), ...)`, in one line."""
    return f"Group({', '.join(f'{name}={part!r}' for name, part in group.parts.items())})"
