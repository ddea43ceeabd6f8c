import math

from jax import Array
from jax.typing import ArrayLike

from .._check import CountedRows, check_array, check_entries, check_positive_int, check_word, concrete, needs_message


def check_fair(num_members: int, *, weighted: bool) -> None:
    """Raises unless there are two or more members without weights, as the fair estimator needs."""
    if num_members < 2:
        raise ValueError(
            needs_message('at least two members for estimator="fair"', f"got {num_members}", 'Use `estimator="nrg"`.')
        )
    if weighted:
        raise ValueError(
            needs_message(
                'equally weighted members for estimator="fair"',
                "got `weights`",
                'Drop them, or use `estimator="nrg"`.',
            )
        )


def check_unit_interval(values: ArrayLike, rows: CountedRows) -> None:
    """Raises unless values are from 0 to 1 or NaN in rows that count; checked where concrete."""
    fix = "They are what `scores.pit` or `scores.pit_gaussian_mixture` returns."
    check_entries("`values` from 0 to 1", values, lambda host: (host < 0) | (host > 1), fix, rows)


def check_per_member(arrays: tuple[ArrayLike, ...], options: dict[str, object]) -> tuple[Array, ...]:
    """Raises unless predictions have equally many members and a target follows. Returns the predictions."""
    if len(arrays) < 2:
        raise ValueError(
            needs_message(
                "predictions, then the target",
                f"got {len(arrays)} arrays",
                "`per_member(scores.nll, logits, labels)`.",
            )
        )
    if "weights" in options:
        fix = "Each member is scored by itself: weight the result, or call the score directly."
        raise ValueError(needs_message("no `weights`", "got `weights`", fix))
    predictions = tuple(check_array("predictions", values) for values in arrays[:-1])
    counts = {prediction.shape[:1] for prediction in predictions}
    if len(counts) > 1 or counts & {(), (0,)}:
        shapes = ", ".join(str(prediction.shape) for prediction in predictions)
        fix = "All arrays but the last are predictions with a leading `members` axis; the last is the target."
        raise ValueError(
            needs_message("predictions with equally many members, at least one", f"got shapes {shapes}", fix)
        )
    return predictions


def check_sets(sets: ArrayLike) -> Array:
    """Raises unless `sets` are booleans `(*batch, classes)`. Returns them as an array."""
    array = check_array("sets", sets)
    if array.dtype != bool:
        fix = "Pass one boolean per class: whether it is in the set."
        raise TypeError(needs_message("boolean `sets`", f"got dtype {array.dtype}, shape {array.shape}", fix))
    if array.ndim < 1:
        raise ValueError(
            needs_message(
                "`sets` of shape (*batch, classes)", f"got shape {array.shape}", "Classes are on the last axis."
            )
        )
    return array


def check_outputs(samples: Array) -> None:
    """Raises unless samples have the axes `(members, *batch, out)`."""
    if samples.ndim < 2:
        fix = "One output? That is `crps`; with `samples[..., None]` it is the same score."
        raise ValueError(needs_message("`samples` of shape (members, *batch, out)", f"got shape {samples.shape}", fix))


def check_two_members(num_members: int) -> None:
    """Raises for fewer than two members, which have no variance."""
    if num_members < 2:
        fix = "For one member that predicts a variance use `scores.nll_gaussian`."
        raise ValueError(needs_message("at least two members to compute a variance", f"got {num_members}", fix))


def check_top_k(k: int, num_classes: int) -> int:
    """Raises unless `k` is from 1 to the number of classes. Returns it."""
    number = check_positive_int(k, "k")
    if number > num_classes:
        fix = "With `k` equal to it, every row counts as correct."
        raise ValueError(needs_message(f"`k` of at most {num_classes}, the number of classes", f"got {k}", fix))
    return number


def no_gradient_message(name: str) -> str:
    """The message for a score that cannot be differentiated."""
    return (
        f"`{name}` has no gradient: where members coincide, that of scoringrules is NaN.\n"
        "Train on `scores.crps` of each output, and evaluate with this score."
    )


def check_interval(lower: ArrayLike, upper: ArrayLike, rows: CountedRows) -> None:
    """Raises if a lower end is above its upper end in a row that counts; checked where concrete."""
    high, fix = concrete(upper), "Swapped? `lower` comes first."
    if high is not None:
        check_entries("`lower` ends at or below `upper` ends", lower, lambda low: low > high, fix, rows)


def check_reduction(reduction: str, rows: tuple[int, ...]) -> None:
    """Raises for an unknown reduction, and for a mean over zero rows."""
    check_word(reduction, "reduction", ("mean", "none"))
    if reduction == "mean":
        check_some_rows(rows)


def check_some_rows(rows: tuple[int, ...]) -> None:
    """Raises if there is no row to average over."""
    if math.prod(rows) == 0:
        fix = "Was every row filtered out?"
        raise ValueError(needs_message("at least one row to average over", f"got rows of shape {rows}", fix))
