import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._leaf_text import leaf_text
from ._statics import StaticGap, static_gap


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
            texts = type(expected).__name__, type(got).__name__
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
