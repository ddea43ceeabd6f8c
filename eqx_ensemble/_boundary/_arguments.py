"""What the signature of an array function says of its arguments."""

import inspect
from typing import Annotated, Any, NamedTuple, get_args, get_origin

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
        kind, values = get_args(annotation)
        return _parts(kind)[0], values
    if hasattr(annotation, "dim_str"):
        return [annotation], None
    found = [_parts(x) for x in get_args(annotation)]
    return [x for parts, _ in found for x in parts], next((values for _, values in found if values), None)
