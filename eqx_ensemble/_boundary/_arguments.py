"""What the arguments of array functions are: the kinds of arrays that signatures name."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Integer, Real


@dataclasses.dataclass(frozen=True)
class Values:
    """What the values of an argument must be, where they can be read, in rows and members that count.

    **Arguments:**

    - `needs`: in words, with the argument's `{name}`; `{last}` is the largest number below `below`, the `{bound}`.
    - `is_wrong`: of the values that count, and of the size or option that is named by `below`.
    - `fix`: what to write instead.
    - `fill`: overwrites what does not count.
    - `place`: whether they lie on the axis of the targets, of which a large common offset can be taken away.
    - `ranked`: whether only their order matters.
    """

    needs: str = ""
    is_wrong: Callable[[np.ndarray, int], Any] = lambda x, bound: np.zeros(x.shape, bool)
    fix: str = ""
    below: str = ""
    fill: float = 0.0
    place: bool = False
    ranked: bool = False


_TINY = np.finfo(np.float32).tiny  # below, arithmetic on most devices takes a number for zero
_LOG_VARIANCE = (
    "A log-variance? Pass `jnp.exp(log_variance)`. A variance that shrinks to zero? Add a floor such as 1e-6."
)
_ABOVE_ZERO = Values("variances above zero", lambda x, _: x < _TINY, _LOG_VARIANCE, fill=1.0)
_NOT_NEGATIVE = Values("variances of zero or more", lambda x, _: x < 0, _LOG_VARIANCE, fill=1.0)
_BELOW = lambda x, bound: (x < 0) | (x >= bound)
_CLASS = Values(
    "labels from 0 to {last}, as there are {bound} classes",
    _BELOW,
    "Leave rows that carry a mark such as -1 out (`row_weights`), and count classes from 0.",
    below="classes",
)
_GROUP = Values(
    "`groups` from 0 to {last}, as `num_groups` is {bound}",
    _BELOW,
    "Count groups from 0, and leave rows without a group out (`row_weights`).",
    below="num_groups",
)
VOTES = Values()
_PLACE = Values(place=True)

Logits = Float[ArrayLike, "members *batch classes"]
Votes = Annotated[Logits, VOTES]
"""Logits of which only the largest matters, so that they may also be probabilities."""
MixedLogits = Float[ArrayLike, "*batch classes"]
Labels = Annotated[Integer[ArrayLike, "*batch"], _CLASS]
Groups = Annotated[Integer[ArrayLike, "*batch"], _GROUP]
Samples = Annotated[Float[ArrayLike, " members *batch"], _PLACE]
Points = Annotated[Float[ArrayLike, "*batch"], _PLACE]
Targets = Annotated[Real[ArrayLike, "*batch"], _PLACE]
Vectors = Annotated[Float[ArrayLike, "members *batch out"], _PLACE]
TargetVectors = Annotated[Real[ArrayLike, "*batch out"], _PLACE]
Variance = Annotated[Float[ArrayLike, "*batch"], _ABOVE_ZERO]
VarianceOrZero = Annotated[Float[ArrayLike, "*batch"], _NOT_NEGATIVE]
Variances = Annotated[Float[ArrayLike, " members *batch"], _ABOVE_ZERO]
VariancesOrZero = Annotated[Float[ArrayLike, " members *batch"], _NOT_NEGATIVE]
Members = Float[ArrayLike, " members *batch"]
Temperature = Annotated[
    Real[ArrayLike, ""],
    Values(
        "a finite `temperature` above zero",
        lambda x, _: ~((x > 0) & (x < np.inf)),
        "Logits are divided by it; 1 leaves them unchanged.",
    ),
]
Sets = Bool[ArrayLike, "*batch classes"]
Ranked = Annotated[Float[ArrayLike, "*batch"], Values(ranked=True, fill=np.nan)]
Weights = Real[ArrayLike, " members"] | None
WeightsOfRows = Real[ArrayLike, " members *rows"] | None
RowWeights = Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None
CountedRows = Bool[ArrayLike, "*batch"] | None
Reduction = Literal["mean", "none"]
Levels = float | Sequence[float]
"""One level, or several `(levels,)`."""


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
        self.options = {name: said[name] for name, x in found.items() if x is None and name != "key"}
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
