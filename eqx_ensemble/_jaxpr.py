"""Finds batch axes made by implicit rank promotion: `(n, 1)` with `(n,)` is `(n, n)`, a wrong loss without an error.

A program is read forward. The reader tracks for each axis whether its length is one, and which call added it. An
operation makes two batch axes if one operand has axis `i` and length one along `j`, and the other has `j` and got `i`
from the same call that combines them, as in rank promotion. An axis that is written in the loss
(`x[:, None]`, `keepdims=True`, `reshape`) is intended; one made under `jax.vmap` belongs to one example.
"""

import functools as ft
import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jaxtyping
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ._pytree import PyTree
from ._warnings import ignore_warnings

# With `EQX_ON_ERROR=breakpoint` Equinox replaces `jax.jit` by a function whose results cannot be traced or lowered.
plain_jit: Any = inspect.unwrap(jax.jit)


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The programs inside an operation: the body of a loop, the branches of a condition, a called function."""
    is_jaxpr = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    yield from (part for part in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(part))


def callbacks(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """The Python functions that a program calls for their results: not those of `jax.debug`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pure_callback", "io_callback"):
            callback = eqn.params["callback"]
            yield getattr(callback, "callback_func", callback)
        for part in inner_jaxprs(eqn):
            yield from callbacks(part)


def has_callbacks(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether a program calls Python while it runs, as `equinox.error_if` does."""
    return any(
        eqn.primitive.name.endswith("callback") or any(map(has_callbacks, inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


# On a CPU such programs wait, in a thread of XLA's pool, for another thread of it: Python functions that call JAX with
# more than some 100 kB (jaxlib 0.12.0), and kernels of singular values, which divide their batch (0.9). Alone they find
# one; two at a time on two cores can hold all threads, and wait for ever.
def must_run_alone(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether a program must not run at the same time as another: it calls Python, or computes singular values."""
    return any(
        eqn.primitive.name.endswith("callback")
        or eqn.primitive.name == "svd"
        or any(map(must_run_alone, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def intermediate_bytes(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """The sum of all intermediate arrays and results of a program, which bounds the memory it needs at a time."""
    own = sum(aval_bytes(var.aval) for eqn in jaxpr.eqns for var in eqn.outvars)
    return own + sum(intermediate_bytes(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))


def aval_bytes(aval: Any) -> int:
    """The bytes of an array of a program; 0 if it is none."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


def unused_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Whether each input of a program affects no output. Inputs of inner programs count as used."""
    sources, effects = output_sources(jaxpr)
    for source in sources:
        effects |= source
    return [not effects >> i & 1 for i in range(len(jaxpr.invars))]


def output_sources(jaxpr: Jaxpr) -> tuple[list[int], int]:
    """The inputs that each output of a program may depend on, and those of its effects, as bits of integers.

    All outputs of an inner program depend on all of its inputs.
    """
    known: dict[Any, int] = {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    of = lambda var: 0 if isinstance(var, Literal) else known.get(var, 0)
    effects = 0
    for eqn in jaxpr.eqns:
        source = 0
        for var in eqn.invars:
            source |= of(var)
        known |= dict.fromkeys(eqn.outvars, source)
        effects |= source if eqn.effects else 0
    return [of(var) for var in jaxpr.outvars], effects


_PACKAGES = Path(jax.__file__).parent.parent
_COMPUTING = tuple(f"{_PACKAGES / name}{os.sep}" for name in ("jax", "jaxlib"))
_BETWEEN = [Path(str(module.__file__)).parent for module in (eqx, optax, jaxtyping)]
_LIBRARIES = tuple(f"{path}{os.sep}" for path in (*_BETWEEN, _PACKAGES / "beartype", Path(__file__).parent))


class Axis(NamedTuple):
    """One axis of an array: whether its length is one, whether the user wrote it, and which call added it."""

    single: bool
    written: bool = False
    call: Any = None


class Value(NamedTuple):
    """An array: its axes, and the number of the array that it is a view of."""

    axes: tuple[Axis, ...]
    source: int


class Outer(NamedTuple):
    """An operation that makes two axes: the shapes before promotion, the axes' lengths, and the line of the code."""

    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, int]
    file: str
    line: int


def outer_operations(jaxpr: Jaxpr) -> list[Outer]:
    """The operations of a program that make two axes by rank promotion."""
    reader = _Reader()
    reader.read(jaxpr, [reader.fresh(var) for var in jaxpr.invars], mapped=False, caller=None)
    return reader.found


class _Reader:
    """Reads a program forward and collects its outer operations."""

    def __init__(self) -> None:
        self.found: list[Outer] = []
        self._count = 0

    def fresh(self, var: Any, *, written: bool = False) -> Value:
        """A new array: an input, or the result of an operation that the reader does not follow."""
        self._count += 1
        shape = getattr(var.aval, "shape", ())
        return Value(tuple(Axis(size == 1, written and size == 1) for size in shape), self._count)

    def read(self, jaxpr: Jaxpr, inputs: list[Value], *, mapped: bool, caller: Any) -> list[Value]:
        """The values of a program's results. `mapped` is set under `jax.vmap`, `caller` in compiled functions."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {var: self.fresh(var, written=True) for var in jaxpr.constvars}
        of = lambda var: self.fresh(var, written=True) if isinstance(var, Literal) else known[var]
        for eqn in jaxpr.eqns:
            values = [of(var) for var in eqn.invars]
            inside = mapped or "vmap" in str(eqn.source_info.name_stack)
            known |= dict(zip(eqn.outvars, self._results(eqn, values, mapped=inside, caller=caller), strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _results(self, eqn: Any, values: list[Value], *, mapped: bool, caller: Any) -> list[Value]:
        if not eqn.outvars:
            return []
        inner = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in inner_jaxprs(eqn)]
        if inner:
            return self._results_of_inner(eqn, inner, values, mapped=mapped, caller=caller)
        out = self.fresh(eqn.outvars[0], written=eqn.primitive.name == "iota")
        rest = [self.fresh(var) for var in eqn.outvars[1:]]
        arrays = [value for value in values if value.axes]
        axes = _view_axes(eqn, values, call=None if mapped else _call(caller or eqn))
        if axes is not None:
            return [Value(axes, values[0].source), *rest]
        like = [value for value in arrays if len(value.axes) == len(out.axes)]
        if eqn.primitive.name in _NEW or not like:
            return [out, *rest]
        if not mapped:
            self._look(eqn, like, caller)
        # A bias of length one has no information about the axes along which it is broadcast.
        wide = [value for value in like if not all(axis.single for axis in value.axes)] or like
        axes = tuple(_joint([value.axes[k] for value in wide]) for k in range(len(out.axes)))
        return [Value(axes, arrays[0].source if len(arrays) == 1 else out.source), *rest]

    def _results_of_inner(
        self, eqn: Any, inner: list[Jaxpr], values: list[Value], *, mapped: bool, caller: Any
    ) -> list[Value]:
        calls = eqn.primitive.name not in ("scan", "while", "cond") and len(inner) == 1
        for jaxpr in inner:
            if calls and len(jaxpr.invars) == len(values) and len(jaxpr.outvars) == len(eqn.outvars):
                # JAX's own compiled functions may have been traced from another line.
                at = eqn if caller is None and _is_of_jax(jaxpr) else caller
                return self.read(jaxpr, values, mapped=mapped, caller=at)
            # Axes from outside may have been written there.
            unknown = [self.fresh(var, written=True) for var in jaxpr.invars]
            self.read(jaxpr, unknown, mapped=mapped, caller=caller)
        return [self.fresh(var) for var in eqn.outvars]

    def _look(self, eqn: Any, values: list[Value], caller: Any) -> None:
        """Records an operation in which one operand has an axis that the other got by rank promotion."""
        shape = _shape(eqn.outvars[0])
        call = _call(caller or eqn)
        if call is None or not any(axis.call == call for value in values for axis in value.axes):
            return
        for first in values:
            for second in values:
                if first.source == second.source:
                    continue  # all pairs of one array
                found = [
                    (shape[i], shape[j])
                    for i in range(len(shape))
                    for j in range(len(shape))
                    if not first.axes[i].single and first.axes[j].single and not first.axes[j].written
                    if not second.axes[j].single and second.axes[i].single and second.axes[i].call == call
                ]
                if found:
                    shapes = tuple(_before_promotion(value, shape, call) for value in (first, second))
                    file, line = _line(caller or eqn)
                    self.found.append(Outer(shapes, found[0], file, line))


_NEW = ("dot_general", "conv_general_dilated", "gather", "scatter", "concatenate", "iota")


def _view_axes(eqn: Any, values: list[Value], *, call: Any) -> tuple[Axis, ...] | None:
    """The axes of a result that is another view of the first operand, or a reduction of it.

    Axes that it adds were written in the `call`; there is none under `jax.vmap`.
    """
    params = eqn.params
    axes: list[Axis] = [*values[0].axes] if values else []
    # An axis that is added to a scalar was not written by the user.
    added = Axis(single=True, written=True, call=call) if call and axes else Axis(single=True)
    match eqn.primitive.name:
        case "broadcast_in_dim":
            back = {k: i for i, k in enumerate(params["broadcast_dimensions"])}
            return tuple(axes[back[k]] if k in back else added for k in range(len(params["shape"])))
        case "transpose":
            return tuple(axes[k] for k in params["permutation"])
        case "squeeze":
            return _without(axes, params["dimensions"])
        case "reshape":
            return _reshape_axes(axes, _shape(eqn.invars[0]), _shape(eqn.outvars[0]), added)
        case "slice" | "dynamic_slice":
            return tuple(
                axis if axis.single else Axis(size == 1)
                for axis, size in zip(axes, _shape(eqn.outvars[0]), strict=True)
            )
        case _ if len(axes) > len(_shape(eqn.outvars[0])) and "axes" in params:
            return _without(axes, params["axes"])
    return None


def _without(axes: list[Axis], gone: Collection[Any]) -> tuple[Axis, ...]:
    return tuple(axis for k, axis in enumerate(axes) if k not in gone)


def _reshape_axes(axes: list[Axis], old: tuple[int, ...], new: tuple[int, ...], added: Axis) -> tuple[Axis, ...]:
    """A reshape may add and remove axes of length one; other axes that change are new ones."""
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return tuple(Axis(size == 1) for size in new)
    left = list(zip(axes, old, strict=True))
    result = []
    for size in new:
        while left and size != 1 and left[0][1] == 1:
            left.pop(0)
        same = bool(left) and left[0][1] == size
        result.append(left.pop(0)[0] if same else added)
    return tuple(result)


def _joint(axes: list[Axis]) -> Axis:
    """The axis of an elementwise result."""
    if not all(axis.single for axis in axes):
        return Axis(single=False)
    return Axis(single=True, written=any(axis.written for axis in axes))


def _before_promotion(value: Value, shape: tuple[int, ...], call: Any) -> tuple[int, ...]:
    kept = [(axis, size) for axis, size in zip(value.axes, shape, strict=True) if axis.call != call]
    return tuple(1 if axis.single else size for axis, size in kept)


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _is_of_jax(jaxpr: Jaxpr) -> bool:
    return any(folder in str(getattr(jaxpr.debug_info, "func_src_info", "")) for folder in _COMPUTING)


def _frames(eqn: Any) -> Iterator[tuple[Any, int]]:
    """The code that made an operation, and the position in it, innermost first, without JAX's own."""
    traceback = eqn.source_info.traceback
    codes, positions = ((), ()) if traceback is None else traceback.raw_frames()
    for code, position in zip(codes, positions, strict=True):
        if not code.co_filename.startswith(_COMPUTING):
            yield code, position


def _call(eqn: Any) -> Any:
    """The call outside of JAX that an operation belongs to; two on one line differ."""
    return next(_frames(eqn), None)


def _line(eqn: Any) -> tuple[str, int]:
    """The file and line of the user's code that an operation belongs to."""
    frames = list(_frames(eqn))
    own = [frame for frame in frames if not frame[0].co_filename.startswith(_LIBRARIES)]
    code, position = (own or frames)[0]
    lines = [line for start, end, line in code.co_lines() if start <= position < end and line]
    return code.co_filename, lines[0] if lines else code.co_firstlineno


_ANOTHER_SIZE = 1009  # a prime, so that no other length is a product with it


def warn_of_two_batch_axes(fn: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Warns once if `fn(*arguments, **named)`, a loss of one member, makes two batch axes by implicit rank promotion.

    The arguments are shapes, the last two of them those of the batch and the key. The loss is traced again with another
    batch size: a length that equals the batch size by chance, such as a layer's, does not change with it.
    """
    *before, batch, key = arguments
    sizes = [x.shape[0] for x in jax.tree.leaves(batch) if _is_struct(x) and x.shape]
    if not sizes or sizes[0] < 2 or _is_known(fn, *_without_batch_size((arguments, named))):
        return
    found = [outer for outer in _outers(fn, arguments, named) if outer.lengths == (sizes[0],) * 2]
    if not found:
        return
    resized = jax.tree.map(lambda x: _resize(x, sizes[0]), batch)
    again = _outers(fn, (*before, resized, key), named)
    lines = {(outer.file, outer.line) for outer in again if outer.lengths == (_ANOTHER_SIZE,) * 2}
    for outer in {(outer.file, outer.line): outer for outer in found if (outer.file, outer.line) in lines}.values():
        rows = sizes[0]
        message = (
            f"The loss `{getattr(fn, '__name__', type(fn).__name__)}` broadcasts the batch axis against itself: line "
            f"{outer.line} of {outer.file} combines arrays of shapes {outer.shapes[0]} and {outer.shapes[1]}, and "
            f"every row is combined with all {rows} rows.\n"
            "Give both one shape, for example `jax.vmap(model)(x)[:, 0]` or `y[:, None]`. If all pairs are meant, "
            "write both axes: `a[:, None] - b[None, :]`."
        )
        warnings.warn_explicit(message, UserWarning, outer.file, outer.line)


def _resize(x: Any, size: int) -> Any:
    if not _is_struct(x) or x.shape[:1] != (size,):
        return x
    return jax.ShapeDtypeStruct((_ANOTHER_SIZE, *x.shape[1:]), x.dtype)


def _without_batch_size(args: PyTree) -> tuple[Any, tuple]:
    """The arguments without batch sizes, which change from step to step."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, tuple((x.shape[1:], x.dtype) if _is_struct(x) else x for x in leaves)


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_known(fn: Callable[..., Any], treedef: Any, leaves: tuple) -> bool:
    """Whether the function was analysed with such arguments before."""
    marks = _marks(fn, treedef, leaves)
    marks.append(True)
    return len(marks) > 1


@ft.lru_cache(maxsize=256)
def _marks(fn: Callable[..., Any], treedef: Any, leaves: tuple) -> list[bool]:
    del fn, treedef, leaves
    return []


def _outers(fn: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Outer]:
    with ignore_warnings():  # the trace for training has shown the loss's own
        try:
            closed, _, _ = eqx.filter_make_jaxpr(fn)(*arguments, **named)
            return outer_operations(closed.jaxpr)
        except Exception:  # a loss for one batch size only, or a new kind of program: training continues
            return []
