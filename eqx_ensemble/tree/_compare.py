import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._caller import caller
from .._check import MemberMismatchError, check_in_range, is_member_array, is_number, member_dtype, path_text
from .._leaf_text import leaf_text
from ._index import Columns
from ._statics import StaticGap, gap_text, static_gap


class Difference(NamedTuple):
    """One path at which one member differs from member 0. `kind` determines the order of the lines and the fix."""

    path: tuple
    member: int
    kind: str
    expected: str
    got: str
    gap: StaticGap | None = None


def from_gap(path: tuple, member: int, kind: str, gap: StaticGap) -> Difference:
    """The difference between two static values at `path`."""
    return Difference(path, member, kind, leaf_text(gap.expected), leaf_text(gap.got), gap)


class Column(NamedTuple):
    """The leaves at one path, one for each member whose structure there is that of member 0."""

    path: tuple
    members: list[int]
    leaves: list


class Walk:
    """Walks several trees in parallel, level by level, as `jax.tree_util` flattens them.

    Two builds of one model may have treedefs that compare unequal although they are equivalent (closures and marker
    objects in static fields), so nodes are compared one by one.
    """

    def __init__(self, trees: list) -> None:
        """**Arguments:** `trees`, one per member; the others are compared with the first one."""
        self.differences: list[Difference] = []
        self._seen: dict[int, dict] = {i: {} for i in range(len(trees))}
        self.columns: list[Column] = list(self._visit((), list(enumerate(trees))))

    def static_gap(self, member: int, expected: Any, got: Any) -> StaticGap | None:
        """`static_gap` with one cache for each member, so that marker objects pair up across the whole tree."""
        return static_gap(expected, got, self._seen[member])

    def _visit(self, path: tuple, nodes: list[tuple[int, Any]]) -> Iterator[Column]:
        _, reference = nodes[0]
        children = _children(reference)
        if children is None:
            alike = [(i, x) for i, x in nodes if _children(x) is None]
            self._unlike(path, nodes, alike)
            yield Column(path, [i for i, _ in alike], [x for _, x in alike])
            return
        levels = [(nodes[0][0], children)]
        for i, node in nodes[1:]:
            level = _children(node)
            if level is not None and self._same_node(path, i, (reference, children), (node, level)):
                levels.append((i, level))
            elif level is None:
                self.differences.append(Difference(path, i, "structure", leaf_text(reference), leaf_text(node)))
        for position, (key, _) in enumerate(children.keyed):
            yield from self._visit(path + key, [(i, level.keyed[position][1]) for i, level in levels])

    def _unlike(self, path, nodes, alike) -> None:
        kept = {i for i, _ in alike}
        for i, node in nodes:
            if i not in kept:
                self.differences.append(Difference(path, i, "structure", leaf_text(nodes[0][1]), leaf_text(node)))

    def _same_node(self, path, member, reference, other) -> bool:
        (expected, level0), (got, level) = reference, other
        if type(expected) is not type(got):
            texts = _class_texts(type(expected), type(got))
        elif [key for key, _ in level0.keyed] != [key for key, _ in level.keyed]:
            texts = _outline(expected, level0), _outline(got, level)
        else:
            self._statics(path, member, reference, other)
            return True
        self.differences.append(Difference(path, member, "structure", *texts))
        return False

    def _statics(self, path, member, reference, other) -> None:
        (expected, level0), (got, level) = reference, other
        if isinstance(expected, eqx.Module):
            pairs = [((*path, jtu.GetAttrKey(name)), *values) for name, *values in _static_fields(expected, got)]
        else:
            pairs = [(path, level0.static, level.static)]
        for where, a, b in pairs:
            gap = self.static_gap(member, a, b)
            if gap is not None:
                kind = "hidden" if gap.hides_array else "static"
                self.differences.append(from_gap(where, member, kind, gap))


def _class_texts(expected: type, got: type) -> tuple[str, str]:
    """The names of two classes, with what tells them apart."""
    if expected.__name__ != got.__name__:
        return expected.__name__, got.__name__
    if expected.__module__ == got.__module__ and expected.__qualname__ == got.__qualname__:
        again = "another class of this name: its cell or module ran again, so make these models anew"
        return got.__name__, f"{got.__name__}, {again}"
    return f"{expected.__module__}.{expected.__qualname__}", f"{got.__module__}.{got.__qualname__}"


class _Level(NamedTuple):
    keyed: list[tuple[tuple, Any]]
    static: Any


def _children(node: Any) -> _Level | None:
    """One level of the tree with its keys and its static data; None for a leaf."""
    keyed, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and keyed[0][0] == ():
        return None
    return _Level(keyed, treedef.node_data()[1])


def _static_fields(expected: eqx.Module, got: eqx.Module) -> Iterator[tuple[str, Any, Any]]:
    dynamic = {f.name for f in dataclasses.fields(expected) if not f.metadata.get("static", False)}
    # Not only fields: a Module that wraps a function also carries its `__name__`, `__doc__` and the like.
    for name in vars(expected) | vars(got):
        if name not in dynamic:
            yield name, vars(expected).get(name), vars(got).get(name)


def _outline(node: Any, level: _Level) -> str:
    kind = type(node).__name__
    if isinstance(node, dict):
        return f"{kind} with keys {[key.key for (key,), _ in level.keyed]}"
    return f"{kind} of {len(level.keyed)}"


_MOST_LINES = 8
_FIXES = {
    "structure": "Models of different structure cannot share one stacked Module: build one ensemble per architecture.",
    "shape": "Models of different sizes cannot share one stacked Module: build one ensemble per size.",
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
SUM_RULES = Rules(needs="trees that differ only in their numbers", noun="tree", scalars="numbers", fixes=_FIXES_OF_SUMS)


def replace_rules(num_members: int | None) -> Rules:
    """The rules for a stacked tree and what replaces one member (None) or `num_members` of them."""
    axis = () if num_members is None else (num_members,)
    needs = "a value that is one member" if num_members is None else f"a value of {num_members} stacked members"
    return Rules(needs, shape=lambda first, own: axis + first[1:], subject="the value", reference="the members")


def compare_trees(trees: list, *, rules: Rules | None = None) -> Columns:
    """Checks that trees differ only where `rules` allows it, and pairs their leaves.

    **Raises:** `MemberMismatchError` that lists every leaf that differs, up to eight.
    """
    rules = Rules() if rules is None else rules
    walk = Walk(trees)
    differences = list(walk.differences)
    for column in walk.columns:
        differences += _leaf_differences(walk, column, rules)
    if differences:
        raise MemberMismatchError(_message(differences, rules))
    for column in walk.columns:
        for leaf in column.leaves:
            if is_member_array(leaf):
                check_in_range(leaf, path=path_text(column.path))
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


def _message(differences: list[Difference], rules: Rules) -> str:
    order = list(rules.fixes)
    differences = sorted(differences, key=lambda d: order.index(d.kind))
    members = sorted({d.member for d in differences})
    reference = rules.reference or f"{rules.noun} 0"
    verb = "differs" if len(members) == 1 else "differ"
    lines = [f"`{caller()}` needs {rules.needs}; {_subject_text(members, rules)} {verb} from {reference}."]
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
    return "\n".join([*lines, *dict.fromkeys(rules.fixes[kind] for kind in order if kind in kinds)])


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
