"""The kinds of arrays that array functions take: their axes, dtypes and values, and what to write instead."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

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
    - `kind`: what they are, where users may have it in another form: `"labels"` one-hot, `"logits"` as probabilities;
        `"votes"` are logits of which probabilities give the same.
    - `of_dtype`: what to write instead of another dtype.
    """

    needs: str = ""
    is_wrong: Callable[[np.ndarray, int], Any] = lambda x, bound: np.zeros(x.shape, bool)
    fix: str = ""
    below: str = ""
    fill: float = 0.0
    place: bool = False
    ranked: bool = False
    kind: Literal["", "labels", "logits", "votes"] = ""
    of_dtype: str = ""


def _no_nan(fix: str) -> Values:
    return Values("`{name}` without NaN", lambda x, _: np.isnan(x), fix, place=True)


def _above_zero(fix: str) -> Values:
    return Values("a finite `{name}` above zero", lambda x, _: ~((x > 0) & (x < np.inf)), fix)


def _zero_or_more(fix: str) -> Values:
    return Values("a finite `{name}` of zero or more", lambda x, _: ~((x >= 0) & (x < np.inf)), fix)


def _finite(fix: str) -> Values:
    return Values("a finite `{name}`", lambda x, _: ~np.isfinite(x), fix)


def _above(bound: int) -> Values:
    fix = "Outputs of a last layer? A head, such as `methods.heads.dirichlet`, maps them to parameters."
    return Values(f"`{{name}}` above {bound}", lambda x, _: x <= bound, fix, fill=bound + 1.0)


def _below(bound: str, words: str, fix: str) -> Values:
    return Values(words, lambda x, bound: (x < 0) | (x >= bound), fix, below=bound)


def _labels(bound: str, words: str) -> Values:
    fix = "Leave out rows marked by a label such as -1 (`row_weights`), and count classes from 0."
    values = _below(bound, f"labels from 0 to {{last}}, as {words}", fix)
    return dataclasses.replace(values, kind="labels")


def _logits(values: Values = Values()) -> Values:  # noqa: B008 (it is frozen)
    return dataclasses.replace(values, kind="logits")


def _repeats(indices: np.ndarray) -> bool:
    known = indices[indices != -1]
    return len(np.unique(known)) < len(known)


_PLACE = Values(place=True)
_TINY = np.finfo(np.float32).tiny  # below, arithmetic on most devices takes a number for zero
_LOG_VARIANCE = (
    "A log-variance? Pass `jnp.exp(log_variance)`. A variance that shrinks to zero? Add a floor such as 1e-6."
)
_POSITIVE = Values("variances above zero", lambda x, _: x < _TINY, _LOG_VARIANCE, fill=1.0)
_NOT_NEGATIVE = Values("variances of zero or more", lambda x, _: x < 0, _LOG_VARIANCE, fill=1.0)
_CLASS = _labels("classes", "there are {bound} classes")
_GROUP = _below(
    "num_groups",
    "`groups` from 0 to {last}, as `num_groups` is {bound}",
    "Pass the number of groups as `num_groups`, count from 0, and leave out rows without a group (`row_weights`).",
)
_SCALE = Values("a `scale` above zero", lambda x, _: x <= 0, "Add a floor: `jnp.maximum(scale, 1e-6)`.", fill=1.0)
_RATIO = _zero_or_more("It is the density of an input among new rows over its density among held-out rows.")
_CANDIDATES = _no_nan("Leave out these candidates: `row_weights=~jnp.isnan(...)`.")
_KNOWN = _no_nan("Leave out these rows: `row_weights=~jnp.isnan(...)`.")

Reduction = Literal["mean", "none"]
Levels = ArrayLike | Sequence[float]
"""One level, or several `(levels,)`."""
InnerLevels = Annotated[Levels, Values("levels without the ends")]

# Weights of members and of rows.
Weights = Real[ArrayLike, " members"] | None
WeightsOfRows = Real[ArrayLike, " members *rows"] | None
RowWeights = Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None
CountedRows = Bool[ArrayLike, "*batch"] | None
RowFilter = Bool[ArrayLike, " rows"] | None
RowScoreWeights = Bool[ArrayLike, " rows"] | Real[ArrayLike, " rows"] | None
PoolRows = Bool[ArrayLike, " candidates"] | None
# Classes.
Logits = Annotated[Float[ArrayLike, "members *batch classes"], _logits()]
Votes = Annotated[Logits, Values(kind="votes")]
MixedLogits = Annotated[Float[ArrayLike, "*batch classes"], _logits()]
Labels = Annotated[Integer[ArrayLike, "*batch"], _CLASS]
RowLabels = Annotated[Integer[ArrayLike, " rows"], _CLASS]
Sets = Bool[ArrayLike, "*batch classes"]
Temperature = Annotated[Real[ArrayLike, ""], _above_zero("Logits are divided by it; 1 leaves them unchanged.")]
# Numbers.
Members = Float[ArrayLike, " members *batch"]
Samples = Annotated[Members, _PLACE]
Points = Annotated[Float[ArrayLike, "*batch"], _PLACE]
Targets = Annotated[Real[ArrayLike, "*batch"], _PLACE]
KnownSamples = Annotated[Members, _KNOWN]
KnownTargets = Annotated[Real[ArrayLike, "*batch"], _KNOWN]
Vectors = Annotated[Float[ArrayLike, "members *batch out"], _PLACE]
TargetVectors = Annotated[Real[ArrayLike, "*batch out"], _PLACE]
PairWeights = Annotated[Real[ArrayLike, "out out"], _zero_or_more("A pair of weight zero does not count.")]
Variance = Annotated[Float[ArrayLike, "*batch"], _POSITIVE]
VarianceOrZero = Annotated[Float[ArrayLike, "*batch"], _NOT_NEGATIVE]
Variances = Annotated[Members, _POSITIVE]
VariancesOrZero = Annotated[Members, _NOT_NEGATIVE]
Threshold = Annotated[Real[ArrayLike, ""], _no_nan("To have no threshold, leave out the argument.")]
Power = Annotated[Real[ArrayLike, ""], _above_zero("1 is the geometric mean, `num_members` the plain product.")]
PriorPrecision = Annotated[Real[ArrayLike, "*some"], _above_zero("A proper prior has a positive precision.")] | None
NoiseOfTargets = Annotated[Real[ArrayLike, "*other"], _above_zero("It is a standard deviation.")] | None
Factor = Annotated[Real[ArrayLike, ""], _zero_or_more("0 leaves the means unchanged.")]
Cut = Annotated[
    Real[ArrayLike, ""],
    Values(
        "a `cut` from 0 to below 0.5",
        lambda x, _: ~((x >= 0) & (x.astype(np.float32) < 0.5)),
        "`cut=0.1` removes 10 % at each end; for 0.5 use `median`.",
    ),
]
# One number for each row.
Ranked = Annotated[Float[ArrayLike, "*batch"], Values(ranked=True, fill=np.nan)]
Losses = Real[ArrayLike, "*batch"]
Positives = Annotated[
    Bool[ArrayLike, "*batch"],
    Values(
        "positive and negative rows that count",
        lambda x, _: np.full(x.shape, x.all() or not x.any()),
        "Ranking scores need both kinds of rows.",
    ),
]
Groups = Annotated[Integer[ArrayLike, "*batch"], _GROUP]
RowGroups = Annotated[Integer[ArrayLike, " rows"], _GROUP]
UnitInterval = Annotated[
    Float[ArrayLike, "*batch"],
    Values(
        "`values` from 0 to 1",
        lambda x, _: (x < 0) | (x > 1),
        "They are what `scores.pit` or `scores.pit_gaussian_mixture` returns.",
    ),
]
Correct = Annotated[
    Real[ArrayLike, " members *batch"] | Bool[ArrayLike, " members *batch"],
    Values(
        "zeros and ones in `correct`",
        lambda x, _: ~np.isin(x, (0, 1)) & ~np.isnan(x),
        "They are `scores.per_member(scores.accuracy, logits, labels, reduction='none')`.",
    ),
]
RowScores = Float[ArrayLike, "rows *scores"]
# Held-out rows of conformal prediction.
Scores = Annotated[Float[ArrayLike, " rows"], _KNOWN]
Predicted = Annotated[Float[ArrayLike, " rows"], _KNOWN]
Observed = Annotated[Real[ArrayLike, " rows"], _KNOWN]
HeldOut = Annotated[Float[ArrayLike, " rows"], _PLACE]
RowTargets = Annotated[Real[ArrayLike, " rows"], _PLACE]
HeldOutLogits = Annotated[Float[ArrayLike, "rows classes"], _logits(_KNOWN)]
Unseen = Annotated[
    Bool[ArrayLike, "members rows"], Values(of_dtype="Drawn rows? Pass `resample.out_of_bag(rows, num_rows)`.")
]
DrawnRows = Annotated[
    Integer[ArrayLike, "members drawn"],
    _below("num_rows", "`rows` from 0 to {last}, as `num_rows` is {bound}", "They index the data from 0."),
]
RowPredictions = Float[ArrayLike, "members rows *outputs"]
LogScores = Annotated[
    Members,
    Values(
        "`log_scores` that are finite or -inf",
        lambda x, _: np.isnan(x) | (x == np.inf),
        "They are `-scores.per_member(scores.nll, logits, labels, reduction='none')` and the like; "
        "leave rows without one out (`row_weights`).",
    ),
]
AnyGroups = Integer[ArrayLike, "*batch"]
RowScale = Annotated[Float[ArrayLike, " rows"], _SCALE]
PointScale = Annotated[Float[ArrayLike, "*batch"], _SCALE]
Ratios = Annotated[Real[ArrayLike, " rows"], _RATIO]
NewRatios = Annotated[Real[ArrayLike, "*batch"], _RATIO]
Thresholds = Float[ArrayLike, " thresholds"]
BoundedLosses = Annotated[
    Float[ArrayLike, "rows thresholds"],
    Values(
        "`losses` of at most `bound`, {bound}, without NaN",
        lambda x, bound: ~(x <= bound * (1 + 1e-5)),
        "Raise `bound`, the largest loss that a row can have; leave out rows without a loss: `row_weights`.",
        below="bound",
    ),
]
Covered = Annotated[
    Bool[ArrayLike, ""] | Real[ArrayLike, ""],
    Values(
        "`covered` from 0 to 1",
        lambda x, _: ~((x >= 0) & (x <= 1)),
        "Pass whether the target was in its set: `(lower <= target) & (target <= upper)`.",
    ),
]
# Held-out rows of calibration.
FiniteLogits = Annotated[
    Logits,
    Values(
        "finite `logits`",
        lambda x, _: ~np.isfinite(x),
        "Probabilities of zero? Mix in a little of the uniform distribution before taking the logarithm.",
        kind="logits",
    ),
]
FiniteTargets = Annotated[
    Real[ArrayLike, "*batch"],
    Values(
        "finite `targets`",
        lambda x, _: ~np.isfinite(x),
        "Leave out these rows: `row_weights=jnp.isfinite(targets)`.",
        place=True,
    ),
]
# Candidates.
PoolSamples = Annotated[Float[ArrayLike, "members candidates"], _CANDIDATES]
PoolLogits = Annotated[Float[ArrayLike, "members candidates classes"], _logits(_CANDIDATES)]
Best = Annotated[Real[ArrayLike, "..."], _finite("Nothing observed yet? Draw the first candidates at random.")]
Beta = Annotated[Real[ArrayLike, ""], _zero_or_more("Its root is the number of standard deviations.")]
Exponent = Annotated[Real[ArrayLike, ""], _zero_or_more("Zero draws uniformly, 1 in proportion.")]
Chosen = Annotated[
    Integer[ArrayLike, " chosen"],
    Values(
        "different indices from 0 to {last} in `chosen`",
        lambda x, bound: (x < -1) | (x >= bound) | _repeats(x),
        "-1 means no candidate.",
        below="candidates",
    ),
]
Evaluated = Annotated[Real[ArrayLike, "*batch steps"], _no_nan("Leave out these runs.")]
Optimum = Annotated[Real[ArrayLike, "..."], _finite("It is the best possible value.")]
# Outputs of a last layer, and the parameters of distributions.
Amount = Annotated[Real[ArrayLike, ""], _zero_or_more("Zero adds nothing.")]
Share = Annotated[
    Real[ArrayLike, ""],
    Values("a `{name}` from 0 to 1", lambda x, _: ~((x >= 0) & (x <= 1)), "Zero changes nothing."),
]
FourOutputs = Float[ArrayLike, "*batch 4"]
Outputs = Float[ArrayLike, "*batch outputs"]
OutputLogits = Annotated[Outputs, _logits()]
OutputPoints = Annotated[Outputs, _PLACE]
OutputVariances = Annotated[Outputs, _POSITIVE]
OutputLevels = Annotated[
    Real[ArrayLike, " outputs"],
    Values(
        "increasing `levels` between 0 and 1",
        lambda x, _: ~((x > 0) & (x < 1)) | (np.diff(x, prepend=0) <= 0),
        "Write 90 % as 0.9. Not in order? Sort them, and the outputs of the last layer with them.",
    ),
]
Concentration = Annotated[MixedLogits, _above(0)]
Evidence = Annotated[Float[ArrayLike, "*batch"], _above(0)]
Shape = Annotated[Float[ArrayLike, "*batch"], _above(1)]
# Predictions of teachers, with the rows first, as in the data of `fit`.
Teachers = Float[ArrayLike, "*batch members classes"]
TeacherMeans = Float[ArrayLike, "*batch members"]
TeacherVariances = Annotated[TeacherMeans, _POSITIVE]
# Hidden units.
Hidden = Float[ArrayLike, "members rows hidden"]
FiniteHidden = Annotated[Hidden, _finite("Leave out members that diverged, and rows by `row_weights`.")]
CountedLabels = Annotated[Integer[ArrayLike, " rows"], _labels("num_classes", "`num_classes` is {bound}")]
# Particles.
Particles = Float[ArrayLike, "members size"]
Active = Bool[ArrayLike, " members"] | None
