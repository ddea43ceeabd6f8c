"""What the signature of an array function says of its arguments."""

import inspect
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import jax
import numpy as np

from .._check import concrete
from .kinds import InnerLevels, Levels, Values


class Argument(NamedTuple):
    """An array: the names of its axes, the dtypes that it may have, and its values."""

    axes: tuple[str, ...]
    dtypes: frozenset[str]
    values: Values

    @property
    def has_members(self) -> bool:
        """Whether its first axis is that of the members."""
        return self.axes[:1] == ("members",)

    @property
    def is_number(self) -> bool:
        """Whether it may be floating-point: then it has the dtype of the computation."""
        return "float32" in self.dtypes


class Arguments:
    """What a function's signature says of its arguments.

    **Attributes:**

    - `arrays`, `options`: by name; without `weights`, `row_weights` and `key`.
    - `static`: the options that are part of a compiled program.
    - `rows`: the axes of `row_weights`, whether these only count rows, and whether `weights` may differ between rows.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        said = {name: x.annotation for name, x in signature.parameters.items()}
        found = {name: _argument(x) for name, x in said.items()}
        weights, row_weights = found.pop("weights", None), found.pop("row_weights", None)
        self.row_axes = ("*batch",) if row_weights is None else row_weights.axes
        self.only_counts = row_weights is not None and not row_weights.is_number
        self.weighs_rows = weights is not None and "*rows" in weights.axes
        self.arrays = {name: x for name, x in found.items() if x is not None}
        self.options = {name: said[name] for name, x in found.items() if x is None and name not in ("key", "self")}
        self.static = [name for name, x in self.options.items() if x not in (Levels, InnerLevels)]
        self.needs_key = "key" in said and signature.parameters["key"].default is inspect.Parameter.empty

    def arrays_of_rows(self, given: dict[str, Any]) -> list[str]:
        """The arrays that are given and have the axes of rows."""
        return [name for name in self.arrays if given[name] is not None and self.is_of_rows(name)]

    def rows_shape(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """The sizes of the axes of rows."""
        name = self.arrays_of_rows(given)[0]
        array, (x, last) = self.arrays[name], (given[name], self.row_axes[-1])
        behind = len(array.axes) - array.axes.index(last) - 1
        return x.shape[int(array.has_members) : x.ndim - behind]

    def is_of_rows(self, name: str) -> bool:
        """Whether an array has the axes of rows."""
        return set(self.row_axes) <= set(self.arrays[name].axes)


def _argument(annotation: Any) -> Argument | None:
    """What an annotation says of an array; `None` for an option."""
    parts, values = _parts(annotation)
    shaped = [x for x in parts if hasattr(x, "dim_str")]
    if not shaped:
        return None
    return Argument(
        tuple(shaped[0].dim_str.split()), frozenset(dtype for x in shaped for dtype in x.dtypes), values or Values()
    )


def _parts(annotation: Any) -> tuple[list[Any], Values | None]:
    """The members of a union, and what the annotation says of values."""
    if get_origin(annotation) is Annotated:
        kind, *_, values = get_args(annotation)  # the last one is the outermost
        return _parts(kind)[0], values
    if hasattr(annotation, "dim_str"):
        return [annotation], None
    found = [_parts(x) for x in get_args(annotation)]
    return [x for parts, _ in found for x in parts], next((values for _, values in found if values), None)


def in_float64(raw: dict[str, Any], of: Arguments) -> dict[str, Any]:
    """Where JAX has no float64, takes from concrete arrays of it what float32 would lose: an offset, and the order."""
    wide = [name for name, x in raw.items() if getattr(x, "dtype", None) in (np.float64, np.int64, np.uint64)]
    if jax.config.read("jax_enable_x64") or not wide:
        return raw
    raw = raw | {name: _ranks(np.asarray(raw[name])) for name in wide if of.arrays[name].values.ranked}
    places = {name: concrete(x) for name, x in raw.items() if of.arrays[name].values.place}
    if "targets" in places and set(places) & set(wide) and all(x is not None for x in places.values()):
        exact = {name: np.asarray(x, np.float64) for name, x in places.items()}
        middle = np.median(exact["targets"]) if exact["targets"].size else 0.0
        spread = np.max(np.abs(exact["targets"] - middle), initial=0)
        if np.isfinite(spread) and abs(middle) > 4 * spread:
            raw |= {name: x - middle for name, x in exact.items()}
    return raw


def _ranks(values: np.ndarray) -> np.ndarray:
    """Numbers of the same order that float32 holds, if it does not hold the values apart."""
    with np.errstate(over="ignore"):
        rounded = np.unique(values.astype(np.float32)).size
    distinct, ranks = np.unique(values, return_inverse=True)
    if rounded == distinct.size or distinct.size >= 2**24:
        return values
    return np.where(np.isnan(values), np.nan, ranks.reshape(values.shape))
