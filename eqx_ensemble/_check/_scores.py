from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays import (
    check_array,
    check_floating,
    check_mask,
    check_same_shape,
    concrete,
    first_text,
    kept_rows,
    needs_message,
    promote,
)
from ._keys import check_key
from ._options import check_positive_int


def check_fair(name: str, num_members: int, *, weighted: bool) -> None:
    """The fair estimator is defined for two or more equally weighted members."""
    if num_members < 2:
        raise ValueError(
            needs_message(
                name, 'at least two members for estimator="fair"', f"got {num_members}", 'Use `estimator="nrg"`.'
            )
        )
    if weighted:
        raise ValueError(
            needs_message(
                name,
                'equally weighted members for estimator="fair"',
                "got `weights`",
                'Drop them, or use `estimator="nrg"`.',
            )
        )


def check_num_bins(name: str, num_bins: int) -> None:
    """A positive count."""
    if isinstance(num_bins, bool) or not isinstance(num_bins, int | np.integer):
        raise TypeError(needs_message(name, "an integer `num_bins`", f"got {num_bins!r}", "15 is usual."))
    if num_bins < 1:
        raise ValueError(needs_message(name, "`num_bins` of one or more", f"got {num_bins}", "15 is usual."))


def check_unit_interval(name: str, values: ArrayLike, mask: ArrayLike | None) -> None:
    """Values from 0 to 1, or NaN, in rows that count; only where they are concrete."""
    host, kept = concrete(values), kept_rows(mask)
    if host is None or kept is None:
        return
    wrong = ((host < 0) | (host > 1)) & kept
    if wrong.any():
        fix = "They are what `scores.pit` or `scores.pit_gaussian_mixture` returns."
        raise ValueError(needs_message(name, "`values` from 0 to 1", first_text(host, wrong), fix))


def check_per_member(name: str, arrays: tuple[ArrayLike, ...], options: dict[str, object]) -> tuple[Array, ...]:
    """One or more predictions with equally many members, then the target."""
    if len(arrays) < 2:
        raise ValueError(
            needs_message(
                name, "predictions, then the target", f"got {len(arrays)} arrays", "`per_member(nll, logits, labels)`."
            )
        )
    if "weights" in options:
        fix = "Each member is scored alone: weight the result, or call the score itself."
        raise ValueError(needs_message(name, "no `weights`", "got `weights`", fix))
    predictions = tuple(jnp.asarray(values) for values in arrays[:-1])
    counts = {prediction.shape[:1] for prediction in predictions}
    if len(counts) > 1 or counts & {(), (0,)}:
        shapes = ", ".join(str(prediction.shape) for prediction in predictions)
        fix = "All arrays but the last are predictions with a leading `members` axis; the last is the target."
        raise ValueError(
            needs_message(name, "predictions with equally many members, at least one", f"got shapes {shapes}", fix)
        )
    return predictions


def check_of_one_shape(name: str, **arrays: ArrayLike) -> tuple[Array, ...]:
    """Floating arrays of one shape, in one dtype."""
    checked = {argument: check_floating(name, argument, values) for argument, values in arrays.items()}
    check_same_shape(name, **checked)
    return promote(*checked.values())


def check_sets(name: str, sets: ArrayLike) -> Array:
    """Booleans `(*batch, classes)`."""
    array = check_array(name, "sets", sets)
    if array.dtype != bool:
        fix = "One boolean per class says whether the set holds it."
        raise TypeError(needs_message(name, "boolean `sets`", f"got dtype {array.dtype}, shape {array.shape}", fix))
    if array.ndim < 1:
        raise ValueError(
            needs_message(
                name, "`sets` of shape (*batch, classes)", f"got shape {array.shape}", "Classes are on the last axis."
            )
        )
    return array


def check_outputs(name: str, samples: Array) -> None:
    """Samples `(members, *batch, out)`."""
    if samples.ndim < 2:
        fix = "One output? That is `crps`; with `samples[..., None]` it is the same score."
        raise ValueError(
            needs_message(name, "`samples` of shape (members, *batch, out)", f"got shape {samples.shape}", fix)
        )


def check_two_members(name: str, num_members: int) -> None:
    """Members that have a variance."""
    if num_members < 2:
        fix = "One member with a variance of its own is judged by `nll_gaussian`."
        raise ValueError(
            needs_message(name, "at least two members, whose variance is taken", f"got {num_members}", fix)
        )


def check_known_weights(name: str, weights: ArrayLike | None) -> None:
    """Weights that can be read."""
    if weights is not None and concrete(weights) is None:
        fix = "Close over the weights instead of passing them into `jax.jit`."
        raise ValueError(
            needs_message(
                name, "`weights` whose values are known, because scoringrules reads them", "got a traced array", fix
            )
        )


def check_random(name: str, key: Any) -> None:
    """One threefry key."""
    check_key(key, name=name)


def check_known(name: str, argument: str, values: ArrayLike, mask: ArrayLike | None) -> None:
    """No NaN in rows that count; only where the values are concrete."""
    host, kept = concrete(values), None if mask is None else concrete(mask)
    if host is None or (mask is not None and kept is None):
        return
    wrong = np.isnan(host.astype(np.float64)) & (True if kept is None else kept)
    if wrong.any():
        fix = "Leave these rows out: `mask=~jnp.isnan(...)`."
        raise ValueError(needs_message(name, f"`{argument}` without NaN", f"got {int(wrong.sum())} of them", fix))


def check_rows_of_scores(
    name: str, values: ArrayLike, row_weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array | None, Array | None]:
    """Scores `(..., rows)`, rows on the last axis, one weight per row, and the mask over rows."""
    array = promote(check_floating(name, "values", values))[0]
    if array.ndim < 1 or array.shape[-1] == 0:
        fix = 'Pass one score per row, what `reduction="none"` gives.'
        raise ValueError(
            needs_message(name, "`values` with at least one row on the last axis", f"got shape {array.shape}", fix)
        )
    rows = check_mask(name, mask, array.shape[-1:])
    if row_weights is None:
        return array, None, rows
    weights = check_array(name, "row_weights", row_weights)
    if weights.shape != array.shape[-1:]:
        got = f"expected shape {array.shape[-1:]}, got {weights.shape}"
        raise ValueError(
            needs_message(name, "one of `row_weights` per row", got, "Rows are on the last axis of `values`.")
        )
    host, kept = concrete(row_weights), kept_rows(mask)
    if host is not None and kept is not None:
        wrong = ~np.isfinite(host.astype(np.float64)) | (host < 0)
        if (wrong & kept).any() or not (host.astype(bool) & kept).any():
            fix = "A row of weight zero does not count, but is drawn; `mask` leaves rows out."
            raise ValueError(
                needs_message(name, "finite `row_weights` of zero or more, not all zero", f"got {host}", fix)
            )
    return array, weights.astype(array.dtype), rows


def check_num_draws(name: str, num_draws: int) -> None:
    """A number of draws that have a spread."""
    if check_positive_int(num_draws, "num_draws", name=name) < 2:
        raise ValueError(needs_message(name, "`num_draws` of two or more", f"got {num_draws}", "1,000 is usual."))


def no_gradient(name: str) -> NoReturn:
    """A score that cannot be differentiated."""
    raise NotImplementedError(
        f"`{name}` has no gradient: where members meet, that of scoringrules is NaN.\n"
        "Train on `scores.crps` of each output, and judge by this score."
    )
