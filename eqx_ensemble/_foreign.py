"""Takes in what users pass: data frames and tensors (without importing their packages), reused arrays, functions."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._caller import caller
from ._pytree import PyTree

# Why arrays are copied: JAX takes a NumPy array without waiting. A call returns before the device has read it, and an
# aligned one is used in place on the CPU, as long as the JAX array lives. A loader that refills its buffers would then
# change the batch of a step that still runs, without an error, and only for some sizes, dtypes and addresses. Which
# arrays JAX shares, and when it copies the others, is not promised, so all of them are copied first.

_CLASSES = {
    "pandas": ("DataFrame", "Series", "Index"),
    "polars": ("DataFrame", "Series", "LazyFrame"),
    "torch": ("Tensor",),
}
_FIXES = {  # dtypes that are no numbers; missing values
    "pandas": ("`pandas.get_dummies`", "`fillna` or `dropna`"),
    "polars": ("`to_dummies`", "`fill_null` or `drop_nulls`"),
}
_OURS = jax.Array | np.ndarray | bool | int | float | None


def is_foreign(value: Any) -> bool:
    """Whether a value is a data frame, a column or a tensor of another library."""
    return _library(value) is not None


def from_foreign(value: Any, argument: str = "values") -> Any:
    """Converts a data frame, a column or a tensor to a NumPy array, without a copy if possible.

    Anything else is returned unchanged. Raises for columns that are not numbers, or have missing values.
    """
    library = _library(value)
    if library is None:
        return value
    if library == "torch":
        return _from_torch(value, argument)
    if library == "polars" and isinstance(value, sys.modules[library].LazyFrame):
        raise TypeError(f"`{caller()}` needs numbers in `{argument}`, got a LazyFrame. Pass `{argument}.collect()`.")
    if not isinstance(value, sys.modules[library].DataFrame):
        return _column_array(value, library, f"`{argument}`")
    labelled = _columns(value, library)
    columns = [_column_array(x, library, f"column {label!r} of `{argument}`") for label, x in labelled]
    whole = value.to_numpy()
    if len({column.dtype for column in columns}) == 1 and whole.dtype == columns[0].dtype:
        return whole
    return np.column_stack(columns) if columns else np.zeros(value.shape, np.float32)


def as_numpy(value: Any, argument: str) -> np.ndarray:
    """`numpy.asarray` of anything, data frames, columns and tensors included."""
    return np.asarray(from_foreign(value, argument))


def from_foreign_tree(tree: PyTree, argument: str) -> PyTree:
    """Converts the data frames, columns and tensors of a tree to NumPy arrays; without any, returns the tree itself."""
    if isinstance(tree, Iterator) or not any(map(is_foreign, jax.tree.leaves(tree))):
        return tree  # an iterator's batches are converted one by one
    convert = lambda path, leaf: from_foreign(leaf, argument + jax.tree_util.keystr(path))
    return jax.tree_util.tree_map_with_path(convert, tree)


def take_in(tree: PyTree, argument: str) -> PyTree:
    """As `from_foreign_tree`, with own copies of all NumPy arrays: for calls that return before devices have read."""
    tree = from_foreign_tree(tree, argument)
    return tree if isinstance(tree, Iterator) else jax.tree.map(own_array, tree)


def own_array(x: Any) -> Any:
    """A copy of a NumPy array of numbers, which the caller may overwrite; anything else unchanged.

    `jnp.array`, `jax.device_put` and compiled calls return before they have copied it, or read it in place.
    """
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray) or x.dtype.kind not in "biufcV":
        return x
    # Wide floats are converted on the way; whether integers fit is checked by value.
    is_wide = x.dtype.kind in "fc" and x.dtype.itemsize >= 8 and x.dtype.isnative
    return np.array(x, jax.dtypes.canonicalize_dtype(x.dtype) if is_wide else None)


def _library(value: Any) -> str | None:
    if isinstance(value, _OURS):
        return None
    for library, names in _CLASSES.items():
        module = sys.modules.get(library)  # which another thread may be importing
        if module is not None and isinstance(value, tuple(vars(module)[x] for x in names if x in vars(module))):
            return library
    return None


def _columns(frame: Any, library: str) -> Iterator[tuple[Any, Any]]:
    if library == "polars":
        return ((column.name, column) for column in frame.get_columns())
    return ((label, frame.iloc[:, i]) for i, label in enumerate(frame.columns))


def _column_array(column: Any, library: str, where: str) -> np.ndarray:
    """A column as an array of numbers, or booleans."""
    dtype = _numpy_dtype(column.dtype) if library == "pandas" else None
    encode, fill = _FIXES[library]
    if not (dtype.kind in "biufc" if dtype is not None else _is_polars_number(column.dtype)):
        raise TypeError(
            f"`{caller()}` needs columns of numbers; {where} has dtype {column.dtype}.\n"
            f"A feature? Leave it out, or {encode} makes a column for each category. Labels? Number them: "
            "`names, labels = np.unique(labels, return_inverse=True)`."
        )
    # NaN in a NumPy column is a number, which each function handles.
    native = isinstance(column.dtype, np.dtype)
    missing = 0 if native else int(column.isna().sum() if library == "pandas" else column.null_count())
    if missing:
        raise ValueError(
            f"`{caller()}` needs columns without missing values; {where} has {missing} of them.\n"
            f"Fill them, or drop these rows: {fill}."
        )
    return column.to_numpy() if native or dtype is None else column.to_numpy(dtype=dtype)


def _is_polars_number(dtype: Any) -> bool:
    return dtype.is_integer() or dtype.is_float() or str(dtype) == "Boolean"


def _numpy_dtype(dtype: Any) -> np.dtype:
    """The dtype of the numbers in a column of pandas; that of objects if they are not numbers."""
    if isinstance(dtype, np.dtype):
        return dtype
    types = sys.modules["pandas"].api.types
    found = getattr(dtype, "numpy_dtype", None) or getattr(dtype, "subtype", None)  # of nullable and of sparse columns
    is_number = types.is_numeric_dtype(dtype) or types.is_bool_dtype(dtype)
    return found if is_number and isinstance(found, np.dtype) else np.dtype(object)


def _from_torch(tensor: Any, argument: str) -> np.ndarray:
    torch = sys.modules["torch"]
    if tensor.is_meta:
        raise TypeError(
            f"`{caller()}` needs numbers in `{argument}`, got a tensor on the device `meta`, which holds none."
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        fix = "dequantize" if tensor.is_quantized else "to_dense"
        raise TypeError(
            f"`{caller()}` needs dense tensors; `{argument}` is {kind}.\nPass a dense one: `{argument}.{fix}()`."
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:  # which NumPy lacks
        return tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    try:
        return tensor.numpy()
    except TypeError as error:
        raise TypeError(
            f"`{caller()}` needs numbers in `{argument}`, got a tensor of {tensor.dtype}.\n"
            f"Convert it: `{argument}.float()`."
        ) from error


class _ByIdentity:
    """A function without a hash, compared by its identity; a bound method by its object's identity."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__wrapped__ = fn  # where signatures are looked up
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self._owner, self._method = getattr(fn, "__self__", fn), getattr(fn, "__func__", None)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._owner is other._owner and self._method is other._method

    def __hash__(self) -> int:
        return hash((id(self._owner), self._method))


_ALIGNMENT = 64  # bytes


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array, aligned so that `jax.device_put` need not copy it to a CPU device."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)
