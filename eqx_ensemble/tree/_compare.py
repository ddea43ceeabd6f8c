import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._caller import caller
from .._check import MemberMismatchError, check_in_range
from .._leaf_text import leaf_text
from .._leaves import is_member_array, is_number, member_dtype, path_text
from ._index import Columns
from ._statics import StaticGap, static_gap


class Difference(NamedTuple):
    """One path at which one member differs from member 0. `kind` determines the order of the lines and the fix."""

    path: tuple
    member: int
    kind: str
    expected: str
    got: str


class _Pair(NamedTuple):
    """A tree that is compared with the first one, node by node.

    Two builds of one model may have treedefs that compare unequal although they are equivalent: closures and marker
    objects in static fields.
    """

    member: int
    rules: "Rules"
    seen: dict  # of `static_gap`: marker objects pair up across the whole tree

    def differences(self, path: tuple, a: Any, b: Any) -> Iterator[Difference]:
        """What differs below a path, in the order of the leaves."""
        expected, got = _children(a), _children(b)
        if expected is None and got is None:
            yield from self._of_leaves(path, a, b)
            return
        texts = _node_texts(a, b, expected, got)
        if texts is not None or expected is None or got is None:
            yield Difference(path, self.member, "structure", *(texts or (leaf_text(a), leaf_text(b))))
            return
        for name, x, y in _static_data(a, b):
            yield from self._of_statics(path if name is None else (*path, jtu.GetAttrKey(name)), x, y, "static")
        for (key, x), (_, y) in zip(expected, got, strict=True):
            yield from self.differences(path + key, x, y)

    def _of_leaves(self, path: tuple, a: Any, b: Any) -> Iterator[Difference]:
        if is_member_array(a) and is_member_array(b):
            shape = self.rules.shape(a.shape, b.shape)
            if b.shape != shape or member_dtype(a) != member_dtype(b):
                kind, expected = "dtype" if b.shape == shape else "shape", jax.ShapeDtypeStruct(shape, a.dtype)
                yield Difference(path, self.member, kind, leaf_text(expected), leaf_text(b))
        elif is_member_array(a) or is_member_array(b):
            yield Difference(path, self.member, "static", leaf_text(a), leaf_text(b))
        elif self.rules.scalars == "numbers" and is_number(a) and is_number(b):
            return
        elif type(a) is float and type(b) is float:
            if self.rules.scalars == "equal":
                may_stack = self.rules.noun == "member" and self.rules.subject is None
                yield from self._of_statics(path, a, b, "float" if may_stack else "static")
        else:
            yield from self._of_statics(path, a, b, "static")

    def _of_statics(self, path: tuple, a: Any, b: Any, kind: str) -> Iterator[Difference]:
        gap = static_gap(a, b, self.seen)
        if gap is None:
            return
        if gap.hides_array:
            text = _hidden_text(gap, _subject_text([self.member], self.rules), self.rules)
            yield Difference(path, self.member, "hidden", "", text)
        else:
            location = f" in {gap.location()}" if gap.location() else ""
            yield Difference(path, self.member, kind, leaf_text(gap.expected), leaf_text(gap.got) + location)


def _children(node: Any) -> list[tuple[tuple, Any]] | None:
    """The keys and nodes one level below; `None` for a leaf."""
    keyed = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return None if len(keyed) == 1 and keyed[0][0] == () else keyed


def _node_texts(a: Any, b: Any, expected: Any, got: Any) -> tuple[str, str] | None:
    """How two nodes differ, in class or keys."""
    if expected is None or got is None:
        return leaf_text(a), leaf_text(b)
    if type(a) is not type(b):
        return _class_texts(type(a), type(b))
    same = [key for key, _ in expected] == [key for key, _ in got]
    return None if same else (_outline(a, expected), _outline(b, got))


def _outline(node: Any, keyed: list) -> str:
    kind = type(node).__name__
    return (
        f"{kind} with keys {[key.key for (key,), _ in keyed]}" if isinstance(node, dict) else f"{kind} of {len(keyed)}"
    )


def _static_data(a: Any, b: Any) -> Iterator[tuple[Any, ...]]:
    """What two nodes of one class hold beside their children: of Modules, by the names of attributes."""
    if not isinstance(a, eqx.Module):
        data = [jtu.tree_structure(x, is_leaf=lambda y, x=x: y is not x).node_data() for x in (a, b)]
        yield None, *[None if x is None else x[1] for x in data]
        return
    dynamic = {f.name for f in dataclasses.fields(a) if not f.metadata.get("static", False)}
    # Not only fields: a Module that wraps a function also carries its `__name__`, `__doc__` and the like.
    for name in vars(a) | vars(b):
        if name not in dynamic:
            yield name, vars(a).get(name), vars(b).get(name)


def _class_texts(expected: type, got: type) -> tuple[str, str]:
    """The names of two classes, with what tells them apart."""
    if expected.__name__ != got.__name__:
        return expected.__name__, got.__name__
    if expected.__module__ == got.__module__ and expected.__qualname__ == got.__qualname__:
        again = "another class of this name: its cell or module ran again, so build these models again"
        return got.__name__, f"{got.__name__}, {again}"
    return f"{expected.__module__}.{expected.__qualname__}", f"{got.__module__}.{got.__qualname__}"


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
    reference: str = "member 0"
    fixes: Mapping[str, str] = _FIXES


CONCATENATE_RULES = Rules(
    needs="stacked trees of the same kind of member",
    noun="tree",
    reference="tree 0",
    shape=lambda first, own: (*own[:1], *first[1:]),
)
POLYAK_RULES = Rules(
    needs="trees that differ only in their arrays", subject="`new`", reference="`old`", fixes=_FIXES_OF_SUMS
)
SUM_RULES = Rules(
    "trees that differ only in their numbers", "tree", scalars="numbers", reference="tree 0", fixes=_FIXES_OF_SUMS
)


def replace_rules(num_members: int | None) -> Rules:
    """The rules for a stacked tree and what replaces one member (None) or `num_members` of them."""
    axis = () if num_members is None else (num_members,)
    needs = "a value for one member" if num_members is None else f"a value for {num_members} stacked members"
    return Rules(needs, shape=lambda first, own: axis + first[1:], subject="the value", reference="the members")


def compare_trees(trees: list, *, rules: Rules | None = None) -> Columns:
    """Checks that trees differ only where `rules` allows it, and pairs their leaves.

    **Raises:** `MemberMismatchError` that lists every leaf that differs, up to eight.
    """
    rules = Rules() if rules is None else rules
    first, *others = trees
    found = [x for i, other in enumerate(others, 1) for x in _Pair(i, rules, {}).differences((), first, other)]
    if found:
        raise MemberMismatchError(_message(found, rules))
    keyed, treedef = jtu.tree_flatten_with_path(first)
    paths = [path_text(path) for path, _ in keyed]
    leaves = [list(column) for column in zip(*map(jtu.tree_leaves, trees), strict=True)]
    for path, column in zip(paths, leaves, strict=True):
        for leaf in column:
            check_in_range(leaf, path=path)
    return Columns(paths, leaves, treedef)


def _message(differences: list[Difference], rules: Rules) -> str:
    order = list(rules.fixes)
    differences = sorted(differences, key=lambda x: order.index(x.kind))
    members = sorted({x.member for x in differences})
    verb = "differs" if len(members) == 1 else "differ"
    lines = [f"`{caller()}` needs {rules.needs}; {_subject_text(members, rules)} {verb} from {rules.reference}."]
    grouped: dict[tuple, dict[str, list[int]]] = {}
    for x in differences:
        grouped.setdefault((x.path, x.kind, x.expected), {}).setdefault(x.got, []).append(x.member)
    for (path, kind, expected), got in list(grouped.items())[:_MOST_LINES]:
        if kind == "hidden":
            text = "; ".join(got)
        else:
            several = len(members) > 1
            texts = [f"{text} ({_subject_text(which, rules)})" if several else text for text, which in got.items()]
            text = f"expected {expected}, got {', '.join(texts)}"
        lines.append(f"  at `{path_text(path)}`: {text}")
    if len(grouped) > _MOST_LINES:
        lines.append(f"  and {len(grouped) - _MOST_LINES} more")
    kinds = {x.kind for x in differences}
    if kinds & {"structure", "shape"}:
        kinds.discard("static")  # static sizes differ as a consequence
    return "\n".join([*lines, *(rules.fixes[kind] for kind in order if kind in kinds)])


def _hidden_text(gap: StaticGap, member: str, rules: Rules) -> str:
    """What says that an array differs that JAX cannot see."""
    verb = "closes over" if any(part.startswith("closure") for part in gap.trail) else "holds"
    location = f", in {gap.location()}" if gap.trail else ""
    expected, got = leaf_text(gap.expected), leaf_text(gap.got)
    both = got if got == expected else f"{got}, not {expected}"
    return f"{member} {verb} an array ({both}) that differs from {rules.reference}'s{location}"


def _subject_text(members: list[int], rules: Rules) -> str:
    if rules.subject is not None:
        return rules.subject
    if len(members) == 1:
        return f"{rules.noun} {members[0]}"
    return f"{rules.noun}s {', '.join(map(str, members[:-1]))} and {members[-1]}"
