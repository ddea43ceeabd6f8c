from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.tree_util as jtu

from .._check import MemberMismatchError, check_in_range, is_member_array, is_number, member_dtype, path_text
from .._leaf_text import leaf_text
from ._columns import Columns
from ._statics import gap_text
from ._walk import Column, Difference, Walk, from_gap

_MOST_LINES = 8
_FIXES = {
    "structure": "Models of different structure cannot share one stacked Module: `group` has a part per architecture.",
    "shape": "Models of different sizes cannot share one stacked Module: `group` has a part per size.",
    "dtype": "Nothing is promoted silently: cast the leaves to one dtype first.",
    "hidden": "Only member 0's would be used for all, since jax does not see it: make it a field of the Module.",
    "float": "Pass `promote_scalars=True` to stack Python floats that differ, or make them arrays.",
    "static": "What is not an array is kept once for all members: make it an array, or build one ensemble per value.",
}
_FIXES_OF_SUMS = {
    "structure": "Only trees of one structure can be added up.",
    "shape": "Nothing is broadcast silently: bring the leaves to one shape first.",
    "dtype": _FIXES["dtype"],
    "hidden": "Jax does not see it, so that it would not be added up: make it a field of the Module.",
    "static": "What is not a number is kept as it is, and must be equal in all trees.",
}

_FIXES_OF_LOOPS = {
    "structure": "A compiled loop carries one tree: return the state with the structure that it came with.",
    "shape": "A compiled loop carries arrays of one shape: reserve the largest, and count what is used.",
    "dtype": _FIXES["dtype"],
    "hidden": "Jax does not see it, so that a compiled loop cannot change it: make it a field of the Module.",
    "static": "Only arrays change in a compiled loop: make it an array, such as `jnp.array(0)`, or leave it as it is.",
}


class Rules(NamedTuple):
    """The permitted differences between trees, and the words of the message about others.

    `scalars`: Python scalars are "equal", or floats may differ ("floats"), or all numbers may ("numbers").
    `shape`: the shape expected of an array, given that of the first tree's and its own.
    """

    needs: str = "models that differ only in their arrays"
    noun: str = "member"
    scalars: Literal["equal", "floats", "numbers"] = "equal"
    shape: Callable[[tuple, tuple], tuple] = lambda first, own: first
    subject: str | None = None
    reference: str | None = None
    fixes: Mapping[str, str] = _FIXES


CONCATENATE_RULES = Rules(
    needs="stacked trees of the same kind of member", noun="tree", shape=lambda first, own: (*own[:1], *first[1:])
)
POLYAK_RULES = Rules(
    needs="trees that differ only in their arrays", subject="`new`", reference="`old`", fixes=_FIXES_OF_SUMS
)
LOOP_RULES = Rules(
    needs="a step that changes only the values of arrays",
    subject="the state that it returned",
    reference="the state before",
    fixes=_FIXES_OF_LOOPS,
)
SUM_RULES = Rules(needs="trees that differ only in their numbers", noun="tree", scalars="numbers", fixes=_FIXES_OF_SUMS)


def replace_rules(num_members: int | None) -> Rules:
    """The rules for a stacked tree and what replaces one member (None) or `num_members` of them."""
    axis = () if num_members is None else (num_members,)
    needs = "a value that is one member" if num_members is None else f"a value of {num_members} stacked members"
    return Rules(needs, shape=lambda first, own: axis + first[1:], subject="the value", reference="the members")


def compare_trees(trees: list, *, name: str, rules: Rules | None = None) -> Columns:
    """Checks that trees differ only where `rules` allows it, and pairs their leaves.

    **Raises:** `MemberMismatchError` that lists every leaf that differs, up to eight.
    """
    rules = Rules() if rules is None else rules
    walk = Walk(trees)
    differences = list(walk.differences)
    for column in walk.columns:
        differences += _leaf_differences(walk, column, rules)
    if differences:
        raise MemberMismatchError(_message(differences, name, rules))
    for column in walk.columns:
        for leaf in column.leaves:
            if is_member_array(leaf):
                check_in_range(leaf, name=name, path=path_text(column.path))
    paths = [path_text(column.path) for column in walk.columns]
    return Columns(paths, [column.leaves for column in walk.columns], jtu.tree_structure(trees[0]))


def _leaf_differences(walk: Walk, column: Column, rules: Rules) -> Iterator[Difference]:
    first = column.leaves[0]
    for i, leaf in zip(column.members[1:], column.leaves[1:], strict=True):
        if is_member_array(first) and is_member_array(leaf):
            shape = rules.shape(first.shape, leaf.shape)
            if leaf.shape != shape or member_dtype(leaf) != member_dtype(first):
                kind = "dtype" if leaf.shape == shape else "shape"
                expected = leaf_text(jax.ShapeDtypeStruct(shape, first.dtype))
                yield Difference(column.path, i, kind, expected, leaf_text(leaf))
        elif is_member_array(first) or is_member_array(leaf):
            yield Difference(column.path, i, "static", leaf_text(first), leaf_text(leaf))
        elif not _may_differ(first, leaf, rules):
            gap = walk.static_gap(i, first, leaf)
            if gap is not None:
                yield from_gap(column.path, i, _kind(first, leaf, gap, rules), gap)


def _may_differ(a: Any, b: Any, rules: Rules) -> bool:
    if rules.scalars == "floats":
        return type(a) is float and type(b) is float
    return rules.scalars == "numbers" and is_number(a) and is_number(b)


def _kind(a, b, gap, rules) -> str:
    if gap.hides_array:
        return "hidden"
    return (
        "float"
        if type(a) is float and type(b) is float and rules.subject is None and rules.noun == "member"
        else "static"
    )


def _message(differences: list[Difference], name: str, rules: Rules) -> str:
    order = list(rules.fixes)
    differences = sorted(differences, key=lambda d: order.index(d.kind))
    members = sorted({d.member for d in differences})
    reference = rules.reference or f"{rules.noun} 0"
    verb = "differs" if len(members) == 1 else "differ"
    lines = [f"`{name}` needs {rules.needs}; {_subject_text(members, rules)} {verb} from {reference}."]
    grouped: dict[tuple, list[Difference]] = {}
    for d in differences:
        grouped.setdefault((d.path, d.kind), []).append(d)
    texts = [_line(path, group, rules, several=len(members) > 1) for (path, _), group in grouped.items()]
    lines += texts[:_MOST_LINES]
    if len(texts) > _MOST_LINES:
        lines.append(f"  and {len(texts) - _MOST_LINES} more")
    kinds = {d.kind for d in differences}
    if kinds & {"structure", "shape"}:
        kinds.discard("static")  # static sizes differ as a consequence
    return "\n".join(lines + [rules.fixes[kind] for kind in order if kind in kinds])


def _line(path: tuple, group: list[Difference], rules: Rules, *, several: bool) -> str:
    if group[0].kind == "hidden":
        reference = rules.reference or f"{rules.noun} 0"
        return f"  at `{path_text(path)}`: " + "; ".join(
            gap_text(d.gap, _subject_text([d.member], rules), reference) for d in group if d.gap is not None
        )
    got: dict[str, list[int]] = {}
    for d in group:
        location = f" in {d.gap.location()}" if d.gap is not None and d.gap.location() else ""
        got.setdefault(d.got + location, []).append(d.member)
    texts = [f"{text} ({_subject_text(members, rules)})" if several else text for text, members in got.items()]
    return f"  at `{path_text(path)}`: expected {group[0].expected}, got {', '.join(texts)}"


def _subject_text(members: list[int], rules: Rules) -> str:
    if rules.subject is not None:
        return rules.subject
    if len(members) == 1:
        return f"{rules.noun} {members[0]}"
    return f"{rules.noun}s {', '.join(map(str, members[:-1]))} and {members[-1]}"
