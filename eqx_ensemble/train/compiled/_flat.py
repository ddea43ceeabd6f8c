"""Compiled calls of flat lists: flattening Modules and hashing their contents takes as long as many small steps."""

import functools as ft
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ..._axes import leaf_kinds
from ..._jaxpr import has_callbacks, plain_jit
from ..._pytree import PyTree
from ..._warnings import ignore_warnings

# The carry that a call returns is remembered with the list of its arrays, so that the next call flattens only the
# batch. Modules are found by `id`; the weak reference tells whether it is still theirs. Without it, a new Module at the
# address of a freed one would run with the arrays of the old one. Programs that call Python, as by `equinox.error_if`,
# are left to `filter_jit`, which turns what XLA raises into the error with the user's message.

ARRAYS = (jax.Array, np.ndarray, np.generic)


def constants_of(leaves: list[Any]) -> tuple:
    """The leaves, with `None` for arrays."""
    return tuple(None if isinstance(x, ARRAYS) else x for x in leaves)


class Kind:
    """Everything in a tree except the values of its arrays, with a hash that is computed once."""

    def __init__(self, treedef: Any, leaves: list[Any]) -> None:
        self.treedef = treedef
        self._constants = constants_of(leaves)
        shapes = tuple((x.shape, x.dtype) for x in leaves if isinstance(x, ARRAYS))
        self.is_of_arrays = len(shapes) == len(leaves)
        self._parts = treedef, self._constants, leaf_kinds(leaves), shapes
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Kind) and self._hash == other._hash and self._parts == other._parts

    def combine(self, arrays: list[Any]) -> PyTree:
        """The tree with these arrays."""
        left = iter(arrays)
        leaves = [next(left) if constant is None else constant for constant in self._constants]
        return jax.tree.unflatten(self.treedef, leaves)


class Flat(NamedTuple):
    """A tree as a list of its arrays; `kind` is everything else."""

    arrays: list[Any]
    kind: Kind


def _flatten(tree: PyTree) -> Flat:
    """The arrays of a tree. Raises a `TypeError` if something else in it cannot be hashed."""
    leaves, treedef = jax.tree.flatten(tree)
    return Flat([x for x in leaves if isinstance(x, ARRAYS)], Kind(treedef, leaves))


class _Known:
    """A cache of flattened Modules, while they are alive; their contents must not be changed in place."""

    def __init__(self) -> None:
        self._flats: dict[int, tuple[weakref.ref, Flat]] = {}

    def find(self, tree: eqx.Module) -> Flat:
        """The arrays of `tree`."""
        found = self._flats.get(id(tree))
        if found is not None and found[0]() is tree:
            return found[1]
        return self.remember(tree, _flatten(tree))

    def remember(self, tree: eqx.Module, flat: Flat) -> Flat:
        """Caches the arrays of `tree`."""
        address = id(tree)
        self._flats[address] = (weakref.ref(tree, lambda _: self._flats.pop(address, None)), flat)
        return flat


_known = _Known()


def key_of(*trees: eqx.Module) -> Hashable:
    """Everything in Modules except the values of their arrays; `None` if it cannot be hashed."""
    try:
        return tuple(_known.find(tree).kind for tree in trees)
    except TypeError:
        return None


class FlatFunction:
    """A compiled `fn((program, inputs, batch), carry)`, which returns the next carry and results.

    Program, inputs and returned carries are flattened once. Functions that call Python, and carries that hold more than
    arrays, are called by `equinox.filter_jit`.
    """

    def __init__(self, fn: Callable[..., Any], *, donate: bool) -> None:
        self._fn, self._donate = fn, donate
        self._filter_jit = eqx.filter_jit(fn, donate="all-except-first" if donate else "none")

    def __call__(self, read: tuple[eqx.Module, eqx.Module, PyTree], carry: eqx.Module) -> tuple[Any, PyTree]:
        """The next carry and the results; `carry` is deleted if it is donated."""
        *constant, batch = read
        try:
            parts = [*map(_known.find, constant), _flatten(batch)]
            last = _known.find(carry)
        except TypeError:  # something cannot be hashed, which `filter_jit` explains
            return self._filter_jit(read, carry)
        program = _flat_program(self._fn, (*(part.kind for part in parts), last.kind), donate=self._donate)
        found = program([part.arrays for part in parts], last.arrays)
        if found is None:
            return self._filter_jit(read, carry)
        leaves, results = found
        carry = jax.tree.unflatten(program.result.treedef, leaves)
        _known.remember(carry, Flat(leaves, program.result))
        return carry, results


class _FlatProgram:
    """A jitted function of flat lists; it returns `None` if `equinox.filter_jit` must be used instead.

    `result` is the kind of the returned carry, known once it is traced.
    """

    def __init__(self, fn: Callable[..., Any], kinds: tuple[Kind, ...], *, donate: bool) -> None:
        self.result: Kind
        self._fn, self._kinds = fn, kinds
        run = lambda arrays, last: self._run(arrays, last)
        run.__name__ = run.__qualname__ = fn.__name__
        self._jit = plain_jit(run, donate_argnums=1 if donate else ())
        self._is_plain: bool | None = None if kinds[-1].is_of_arrays else False

    def __call__(self, arrays: list[list[Any]], last: list[Any]) -> tuple[list[Any], PyTree] | None:
        """The arrays of the next carry, and the results."""
        if self._is_plain:
            return self._jit(arrays, last)
        if self._is_plain is None:
            traced = self._jit.trace(arrays, last)
            self._is_plain = self.result.is_of_arrays and not has_callbacks(traced.jaxpr.jaxpr)
            if self._is_plain:
                with ignore_warnings("Some donated buffers were not usable"):
                    return self._jit(arrays, last)
        return None

    def _run(self, arrays: list[list[Any]], last: list[Any]) -> tuple[list[Any], PyTree]:
        *read, carry = (kind.combine(part) for kind, part in zip(self._kinds, [*arrays, last], strict=True))
        carry, results = self._fn(tuple(read), carry)
        leaves, treedef = jax.tree.flatten(carry)
        self.result = Kind(treedef, leaves)
        return [x for x in leaves if isinstance(x, ARRAYS)], results


_flat_program = ft.lru_cache(maxsize=512)(_FlatProgram)
