"""Compiled calls, found by everything in their arguments except the values of arrays.

JAX finds a compiled program by what is constant in the arguments, compared by `==`. That is too coarse for what users
pass: a function that was edited in a notebook is still the same object, and 1, 1.0 and True are equal. The call would
run the old code, or calculate with the other number's type, without an error. It is slow, too: flattening Modules and
hashing their contents takes as long as many small steps. So `fit`, `make_step`, `scan_steps`, `map_members` and
`predict` call their programs here, with flat lists of arrays.
"""

import functools as ft
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ._code import Code, code_of
from ._ids import Ids, holds_ids, open_ids
from ._jaxpr import has_callbacks, intermediate_bytes, must_run_alone, plain_jit
from ._pytree import PyTree
from ._warnings import ignore_warnings

ProgramKey = tuple[Any, ...]

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_NUMBERS = (int, float, complex)
_SEQUENCES = (tuple, list)
_TEXTS = (str, Ids)


def program_key(tree: Any) -> ProgramKey:
    """What distinguishes compiled programs beside the structure and the constants of their arguments.

    Constants are leaves other than arrays, and static fields. They are compared by Python's `==`, by which `4` and
    `4.0`, or `0.0` and `-0.0`, are equal; and functions and classes that are the same may have been edited since.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return (*_kinds(leaves), *_static_kinds(treedef), code_of(_functions(leaves, treedef)))


def _kinds(values: list[Any]) -> ProgramKey:
    """The positions, types and texts of the numbers among some values; those of NumPy are arrays."""
    return tuple(
        (i, type(x), repr(x)) for i, x in enumerate(values) if isinstance(x, _NUMBERS) and not isinstance(x, np.generic)
    )


def _static_kinds(treedef: Any) -> ProgramKey:
    return tuple([(i, type(x), repr(x)) for i, x in enumerate(x for x in _static(treedef) if isinstance(x, _NUMBERS))])


def _functions(leaves: Any, treedef: Any) -> list[Any]:
    """The classes of a tree's nodes, and the functions and objects among its constants."""
    classes = dict.fromkeys(node[0] for node in _nodes(treedef))
    static = [x for x in _static(treedef) if not isinstance(x, _NUMBERS)]
    return [*classes, *(x for x in leaves if callable(x)), *static]


def _static(treedef: Any) -> list[Any]:
    """The static values in a structure, also those inside of tuples and lists."""
    found, left = [], [data for _, data in reversed(_nodes(treedef))]
    while left:
        value = left.pop()
        if value is None or isinstance(value, _TEXTS):
            continue
        if isinstance(value, _SEQUENCES):
            left += reversed(value)
        else:
            found.append(value)
    return found


def _nodes(treedef: Any) -> list[Any]:
    found, left = [], [treedef]
    while left:
        at = left.pop()
        node = at.node_data()
        if node is not None:
            found.append(node)
            left += reversed(at.children())
    return found


@ft.lru_cache(maxsize=512)
def _traits(treedef: Any) -> tuple[bool, bool]:
    """Whether all nodes are tuples or Modules: a dict or a list could be changed in place; and whether any is static.

    Structures that are equal by `==` differ in neither.
    """
    immutable = all(issubclass(node[0], tuple | eqx.Module | Ids | type(None)) for node in _nodes(treedef))
    return immutable, bool(_static(treedef))


class Structure:
    """Everything in a tree except the values of its arrays, with a hash that is computed once."""

    def __init__(self, treedef: Any, shapes: tuple, constants: tuple = (), kinds: tuple = ()) -> None:
        self.treedef, self.constants, self.is_immutable = treedef, constants, _traits(treedef)[0]
        self._parts = treedef, shapes, constants, kinds
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self._hash == other._hash and self._parts == other._parts

    def combine(self, arrays: list[Any]) -> PyTree:
        """The tree with these arrays."""
        if self.constants:
            left = iter(arrays)
            arrays = [next(left) if x is None else x for x in self.constants]
        return jax.tree.unflatten(self.treedef, arrays)

    def functions(self) -> list[Any]:
        """The functions, classes and objects that a program with such an argument may call."""
        return _functions(self.constants, self.treedef)


class Flat(NamedTuple):
    """A tree as a list of its arrays. `code` is that of the program that returned the tree, called with `first`."""

    arrays: list[Any]
    structure: Structure
    code: Code | None = None
    first: Any = None


# The Modules that calls took and returned are remembered with the lists of their arrays, while they are alive, so that
# the next call flattens only the batch. Modules are found by `id`; the weak reference tells whether it is still theirs.
# Without it, a new Module at the address of a freed one would run with the arrays of the old one.

_remembered: dict[tuple[int, bool], tuple[weakref.ref, Flat]] = {}


def flatten(tree: PyTree, *, owned: bool = False, is_carry: bool = False) -> Flat:
    """The arrays of a tree. Raises a `TypeError` if something else in it cannot be hashed.

    Modules are looked into once; those with a dict or a list inside again, unless they are `owned`. The ids of an
    ensemble are among its arrays, so that one program serves all members; those of a carry are not, which has one
    structure before and after.
    """
    if tree is None:
        return _NOTHING
    keeps_ids = is_carry and holds_ids(tree)
    found = _remembered.get((id(tree), keeps_ids))
    known = found[1] if found is not None and found[0]() is tree else None
    if known is not None and (owned or known.structure.is_immutable):
        return known
    leaves, treedef = jax.tree.flatten(tree if keeps_ids else open_ids(tree))
    arrays = [x for x in leaves if isinstance(x, _ARRAYS)]
    constants = () if len(arrays) == len(leaves) else tuple(None if isinstance(x, _ARRAYS) else x for x in leaves)
    if known is not None and treedef == known.structure.treedef:
        if all(x is y for x, y in zip(constants, known.structure.constants, strict=True)):
            return known._replace(arrays=arrays)
    shapes = tuple([(x.shape, x.dtype) for x in arrays])
    if constants or _traits(treedef)[1]:
        structure = Structure(treedef, shapes, constants, (_kinds(leaves), _static_kinds(treedef)))
    else:
        structure = _structure_of_arrays(treedef, shapes)
    flat = Flat(arrays, structure)
    if isinstance(tree, eqx.Module):
        _remember(tree, flat, keeps_ids=keeps_ids)
    return flat


_structure_of_arrays = ft.lru_cache(maxsize=512)(Structure)
_NOTHING = Flat([], Structure(jax.tree.structure(None), ()))


def _remember(tree: eqx.Module, flat: Flat, *, keeps_ids: bool) -> None:
    address = id(tree), keeps_ids
    _remembered[address] = weakref.ref(tree, lambda _: _remembered.pop(address, None)), flat


def key_of(*trees: PyTree) -> Hashable:
    """Everything in trees that are owned, except the values of their arrays; `None` if it cannot be hashed."""
    try:
        return tuple(flatten(tree, owned=True).structure for tree in trees)
    except TypeError:
        return None


class CompiledCall:
    """A compiled `fn(read, carry)`, which returns `(after, results)`; `read` is a tuple of trees.

    A program is used again only for the same structures, with numbers of the same types, and for the same code. It is
    not looked at in calls that go on from the `after` of the same code and the same first object of `read`, as in a
    training loop: an equal one, such as a step made anew, may be meant to have the edited code.

    **Arguments:**

    - `donate`: whether the arrays of the carry are donated.
    - `owned`: whether nobody else holds the arguments. Then nothing in them is changed in place, and one of them tells
        the versions of the code apart.
    - `most`: the number of programs that are kept; each holds its functions and the variables that these read.
    """

    def __init__(self, fn: Callable[..., Any], *, donate: bool = False, owned: bool = False, most: int = 512) -> None:
        self._fn, self._owned = fn, owned
        self._program = ft.lru_cache(maxsize=most)(lambda *of: _Program(fn, of, donate=donate, owned=owned))

    def __call__(self, read: tuple[PyTree, ...], carry: PyTree = None) -> tuple[Any, PyTree]:
        """Calls `fn`; `carry` is deleted if it is donated."""
        try:
            parts = [flatten(x, owned=self._owned) for x in read]
            parts.append(flatten(carry, owned=self._owned, is_carry=True))
            program = self._program(*[part.structure for part in parts])
        except TypeError:  # something cannot be hashed, which `filter_jit` explains
            return eqx.filter_jit(self._fn)(read, carry)
        first = read[0] if read else None
        run = program.run if program.is_current(parts, first) else program.compile
        *arrays, last = [part.arrays for part in parts]
        leaves, results, more = run(arrays, last)
        if more.results is not None:
            results = eqx.combine(results, more.results)
        after = more.after.combine(leaves)
        if more.is_module:
            _remember(after, Flat(leaves, more.after, program.code, first), keeps_ids=holds_ids(after))
        return after, results

    def traits(self, read: tuple[PyTree, ...], carry: PyTree = None) -> "Traits | None":
        """What is known of the program of such a call; `None` if the call would compile."""
        try:
            parts = [*(flatten(x, owned=self._owned) for x in read), flatten(carry, owned=self._owned, is_carry=True)]
            program = self._program(*[part.structure for part in parts])
            return program.traits if program.is_current(parts, read[0] if read else None) else None
        except TypeError:
            return None


class Traits(NamedTuple):
    """Whether a program must run alone, and the sum of all its intermediate arrays and results in bytes."""

    runs_alone: bool
    bytes: int


class _Program:
    """A function, compiled for arguments that differ only in the values of their arrays.

    Programs that call Python, as by `equinox.error_if`, are calls of `equinox.filter_jit`, which turns what XLA raises
    into the error with the user's message.
    """

    def __init__(self, fn: Callable[..., Any], structures: tuple[Structure, ...], *, donate: bool, owned: bool) -> None:
        self.run: Any = None  # of arrays
        self.code: Code | None = None
        self.traits: Traits | None = None
        self._fn, self._structures, self._donate, self._owned = fn, structures, donate, owned

    def is_current(self, parts: list[Flat], first: Any) -> bool:
        """Whether it is compiled, from code that returned one of the arguments or has not been edited since."""
        if self.run is None or self.code is None:
            return self.run is not None
        for part in parts:
            if part.code is self.code and part.first is first:
                return True
        return self.code.is_current()

    def compile(self, arrays: list[list[Any]], last: list[Any]) -> tuple[list[Any], PyTree, "_More"]:
        """Compiles the code as it is now, and runs it."""
        code = None if self._owned else code_of(x for structure in self._structures for x in structure.functions())

        def run(arrays: list[list[Any]], last: list[Any]) -> tuple[list[Any], PyTree, _More]:
            *read, carry = map(Structure.combine, self._structures, [*arrays, last])
            after, results = self._fn(tuple(read), carry)
            leaves, structure = flatten(after, is_carry=True)[:2]
            same = [x for x in self._structures if x == structure]  # which is found sooner than an equal one
            own, constants = eqx.partition(results, lambda x: isinstance(x, _ARRAYS))
            constants = constants if jax.tree.leaves(constants) else None
            return (
                leaves,
                own,
                _More(same[0] if same else structure, constants, is_module=isinstance(after, eqx.Module)),
            )

        run.__name__ = run.__qualname__ = self._fn.__name__
        compiled = plain_jit(run, donate_argnums=1 if self._donate else ())
        jaxpr = compiled.trace(arrays, last).jaxpr.jaxpr
        traits = Traits(must_run_alone(jaxpr), intermediate_bytes(jaxpr))
        if has_callbacks(jaxpr):
            compiled = eqx.filter_jit(run, donate="all-except-first" if self._donate else "none")
        with ignore_warnings("Some donated buffers were not usable"):
            out = compiled(arrays, last)
        self.traits = traits
        self.run, self.code = compiled, code  # in this order: another thread may be between two lines
        return out


@jax.tree_util.register_static
class _More:
    """What a program returns beside arrays: the structure of `after`, and the constants of the results."""

    def __init__(self, after: Structure, results: PyTree, *, is_module: bool) -> None:
        self.after, self.results, self.is_module = after, results, is_module


def filter_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`equinox.filter_jit` for a function that calls the user's functions and models, or holds numbers as constants."""
    run = lambda read, _: (None, fn(*read[:-1], **read[-1]))
    run.__name__ = fn.__name__
    call = CompiledCall(run)
    return lambda *args, **options: call((*args, options))[1]
