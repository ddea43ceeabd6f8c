"""Checks of exported programs, and of their inputs, outputs and options."""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._caller import caller
from .._check import kind_text
from .._files import PLAIN_DTYPES
from .._jaxpr import inner_jaxprs
from .._leaf_text import leaf_text
from .._older_jax import InconclusiveDimensionOperation

_PLATFORMS = ("cpu", "cuda", "tpu", "rocm")
_MOST_INSIDE = 2**31  # the limit of the file format of `jax.export`
_CONTAINERS = "dicts with string keys, lists and tuples"


def check_row_shapes(shapes: Any) -> Any:
    """Checks the shapes of one row of the input, and returns the tree with a `jax.ShapeDtypeStruct` for each."""
    rows = _check_node(shapes, "shapes")
    if not jax.tree.leaves(rows):
        raise TypeError(f"`{caller()}` needs the shape of at least one array in `shapes`, got {shapes!r}.")
    return rows


def _check_node(node: Any, path: str) -> Any:
    if node is None:
        return None
    if type(node) is tuple and all(isinstance(size, int) for size in node):
        return _check_row(node, np.dtype(float), path)
    if isinstance(node, jax.ShapeDtypeStruct):
        return _check_row(node.shape, node.dtype, path)
    if type(node) is dict:
        check_string_keys(node, path)
        return {key: _check_node(value, f"{path}[{key!r}]") for key, value in node.items()}
    if type(node) in (list, tuple) and not any(isinstance(part, int) for part in node):
        return type(node)(_check_node(part, f"{path}[{i}]") for i, part in enumerate(node))
    fix = f"Inputs are arrays in {_CONTAINERS}: other types would have to be there where the program is loaded."
    if getattr(node, "shape", None) is not None and getattr(node, "dtype", None) is not None:
        fix = "For a batch `x` pass `jax.ShapeDtypeStruct(x.shape[1:], x.dtype)`: the shape of one row."
    elif isinstance(node, int | list):
        fix = "Write a shape as a tuple: `shapes=(13,)`."
    raise TypeError(
        f"`{caller()}` needs shapes of one row, such as `(13,)`, or `jax.ShapeDtypeStruct`s; at `{path}`: "
        f"{leaf_text(node) if getattr(node, 'shape', None) is not None else kind_text(node)}.\n{fix}"
    )


def _check_row(shape: tuple, dtype: Any, path: str) -> jax.ShapeDtypeStruct:
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(
            f"`{caller()}` needs sizes of zero or more in `shapes`; at `{path}`: got {shape}.\n"
            "Only the number of rows, which is not part of the shape, and that of the members can be left open."
        )
    if not isinstance(dtype, np.dtype):
        raise TypeError(
            f"`{caller()}` needs inputs of plain dtypes in `shapes`; at `{path}`: got {dtype}.\nPass the data of keys "
            "(`jax.random.key_data`), and make keys of them again in `fn`, by `jax.random.wrap_key_data`."
        )
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def check_string_keys(node: Mapping[Any, Any], path: str) -> None:
    """Checks that the keys of a dict are strings."""
    for key in node:
        if not isinstance(key, str):
            raise TypeError(
                f"`{caller()}` needs strings as the keys of dicts; at `{path or '<root>'}`: got the key {key!r}."
            )


def check_output(value: Any, path: str) -> None:
    """Checks that a part of the output is an array or a number."""
    if not isinstance(value, bool | int | float | complex):
        raise TypeError(
            f"`{caller()}` needs outputs that are arrays in {_CONTAINERS}; at `{path or '<root>'}`: "
            f"{kind_text(value)}.\n"
            "Named tuples are returned as dicts. Take other types apart in `fn` or `combine`: where the program is "
            "loaded they do not exist."
        )


def check_platforms(values: Any) -> tuple[str, ...]:
    """Checks names of platforms and returns each once."""
    listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    if not listed or any(not isinstance(value, str) or value not in _PLATFORMS for value in listed):
        texts = [value for value in (values, *listed) if isinstance(value, str)]
        hint = "\nA GPU is `'cuda'` or `'rocm'`." if "gpu" in texts else ""
        raise ValueError(f"`{caller()}` needs `platforms` as a list of {', '.join(_PLATFORMS)}; got {values!r}.{hint}")
    return tuple(dict.fromkeys(listed))


def check_fits_inside(num_bytes: int) -> None:
    """Checks that leaves are small enough to be constants of a program."""
    if num_bytes >= _MOST_INSIDE:
        raise ValueError(
            f"`{caller()}` can keep less than {_MOST_INSIDE} bytes of leaves inside a program; these have "
            f"{num_bytes}.\nPass `leaves='beside'`."
        )


def check_plain_dtypes(arrays: Mapping[str, Any]) -> None:
    """Checks that safetensors supports the dtypes of leaves."""
    for path, array in arrays.items():
        if array.dtype.name not in PLAIN_DTYPES:
            raise TypeError(
                f"`{caller()}` cannot put the leaf `{path}` of dtype {array.dtype.name} beside the program: "
                "safetensors has no such type.\nPass `leaves='inside'`, or cast it."
            )


def check_no_callbacks(jaxpr: Jaxpr) -> None:
    """Checks that no part of a program calls back into Python."""
    for found in _primitives(jaxpr):
        if "callback" in found or found == "debug_print":
            raise TypeError(
                f"`{caller()}` cannot export a program that calls Python while it runs: found `{found}`.\nTake out "
                "`jax.debug`, `jax.pure_callback` and the like. Checks of `equinox.error_if` are left out when the "
                "environment variable `EQX_ON_ERROR=off` is set."
            )


def check_no_random_numbers(jaxpr: Jaxpr) -> None:
    """Checks that no part of a program draws random numbers: those of ONNX do not depend on a key."""
    for found in _primitives(jaxpr):
        if found.startswith(("random_", "rng_", "threefry")):
            raise NotImplementedError(
                f"`{caller()}` cannot convert random numbers: found `{found}`. ONNX would draw different numbers.\n"
                "Draw them before, and pass them as an input; or use `export`."
            )


def _primitives(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for part in inner_jaxprs(eqn):
            yield from _primitives(part)


@contextlib.contextmanager
def explain_export(row: Any) -> Iterator[None]:
    """Adds a note to errors of a member or of `combine`: the shapes that they were called with."""
    try:
        yield
    except (TypeError, ValueError, InconclusiveDimensionOperation) as error:
        if isinstance(error, InconclusiveDimensionOperation) or "_DimExpr" in str(error):
            error.add_note(
                f"`{caller()}` leaves the number of rows open, and with `symbolic_members=True` that of the members. "
                "Python can neither decide by these sizes nor print what has them: take out `jax.debug.print` and the "
                "like, or pass `batch_size=` and a fixed number of members."
            )
        else:
            listed = ", ".join(leaf_text(leaf) for leaf in jax.tree.leaves(row))
            error.add_note(f"`{caller()}` calls a member with one row of the input, here {listed}, as `shapes` says.")
        raise


@contextlib.contextmanager
def explain_onnx() -> Iterator[None]:
    """Adds a note to errors of the converter: its version, and the alternative."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"`export_onnx` converts with jax2onnx {importlib.metadata.version('jax2onnx')}, which does not know every "
            f"operation of jax, and may not know jax {jax.__version__} yet. `export` has no such limit."
        )
        raise
