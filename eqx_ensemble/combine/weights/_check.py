import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..._caller import caller
from ..._check import (
    check_array,
    check_floating,
    check_number,
    check_plain_weights,
    check_positive_int,
    check_row_weights,
    check_values,
    check_weights,
    concrete,
    first_text,
    is_traced,
    type_error,
    value_error,
)
from ..._foreign import as_numpy
from ..._warnings import warn

_HOW_TO_SCORE = "They are `-scores.per_member(scores.nll, logits, labels, reduction='none')` and the like."


def check_log_scores(
    log_scores: ArrayLike, row_weights: ArrayLike | None, *, relative: bool = True
) -> tuple[Array, Array | None]:
    """Raises unless log scores are finite or -inf, and not -inf for all members. Returns them and the row weights."""
    array = check_values("log_scores", log_scores)
    if math.prod(array.shape) == 0:
        raise value_error("at least one row in `log_scores`", f"got shape {array.shape}", "Was every row filtered out?")
    rows = check_row_weights(row_weights, array.shape[1:], array.dtype if relative else None)
    weights = None if rows.weights is None else rows.weights.astype(array.dtype)
    host, counted = concrete(log_scores), rows.known
    if host is None or counted is None:
        return rows.blank(array, before=1), weights
    host = np.asarray(host, np.float64)
    wrong = (np.isnan(host) | (host == np.inf)) & counted
    if wrong.any():
        fix = f"Remove members with such scores, or exclude the rows with `row_weights`. {_HOW_TO_SCORE}"
        raise value_error("`log_scores` that are finite or -inf", first_text(host, wrong), fix)
    hopeless = (host == -np.inf).all(axis=0) & counted
    if hopeless.any():
        fix = "No weights explain such a row: exclude it (`row_weights`), or bound probabilities away from 0."
        raise value_error("a member above -inf in every row of `log_scores`", f"got none in {_where(hopeless)}", fix)
    _check_logarithms(host, np.broadcast_to(counted, host.shape[1:]))
    return rows.blank(array, before=1), weights


def _check_logarithms(scores: np.ndarray, counted: np.ndarray) -> None:
    """Raises for log-probabilities of all classes; warns about values that look like probabilities."""
    if scores.ndim > 2 and scores.shape[-1] > 1 and counted.all():
        sums = np.exp(np.minimum(scores, 1.0)).sum(axis=-1)
        if np.allclose(sums, 1.0, atol=1e-4):
            got = f"got shape {scores.shape}, whose probabilities sum to 1 on the last axis"
            fix = f"Take the log-probabilities of the labels. {_HOW_TO_SCORE}"
            raise value_error("one of `log_scores` per member and row", got, fix)
    if scores.ndim == 1:
        return  # one evidence per member
    kept = scores[:, counted]
    if (kept >= 0).all() and (kept <= 1).all() and (kept > 0).any():
        warn(
            f"`{caller()}` takes natural logarithms, but all `log_scores` are from 0 to 1, as probabilities are.\n"
            "Pass `jnp.log(probabilities)`. Log-densities in that range are fine."
        )


def check_scores_of_members(scores: ArrayLike, count: Any) -> tuple[Array, int]:
    """Raises unless there is one score per member, and `count` are not NaN. Returns the scores and the count."""
    array, number = check_array("scores", scores), check_positive_int(count, "count")
    if array.ndim != 1:
        fix = "`scores.per_member` makes them."
        raise value_error("one score per member, `(members,)`", f"got shape {array.shape}", fix)
    if number > array.shape[0]:
        raise value_error(
            "`count` of at most the number of members", f"got {number} of {array.shape[0]}", "Ask for fewer."
        )
    host = concrete(scores)
    if host is not None and (known := int((~np.isnan(host)).sum())) < number:
        raise value_error(
            "`count` members with a score that is not NaN", f"got {known}, need {number}", "Ask for fewer."
        )
    return array, number


def check_similarity(similarity: ArrayLike, count: Any, quality: Any) -> tuple[Array, int, Array]:
    """Raises unless the matrix is symmetric positive semi-definite. Returns it, the count, and the quality."""
    matrix, number = check_floating("similarity", similarity), check_positive_int(count, "count")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        fix = "For classes, `1 - uncertainty.pairwise_disagreement(logits)`."
        raise value_error("`similarity` (members, members)", f"got shape {matrix.shape}", fix)
    if number > matrix.shape[0]:
        got = f"got {number} of {matrix.shape[0]}"
        raise value_error("`count` of at most the number of members", got, "Ask for fewer.")
    matrix = matrix.astype(matrix.dtype if jnp.finfo(matrix.dtype).bits >= 32 else jnp.float32)
    _check_semi_definite(similarity)
    if quality is None:
        return matrix, number, jnp.ones(matrix.shape[0], matrix.dtype)
    scale = check_array("quality", quality)
    if scale.shape != matrix.shape[:1]:
        got = f"got shape {scale.shape}, need ({matrix.shape[0]},)"
        raise value_error("one `quality` per member", got, "Higher is better.")
    host = concrete(quality)
    if host is not None and not (np.isfinite(host) & (host >= 0)).all():
        fix = "For log scores pass `jnp.exp(log_scores)`."
        raise value_error("`quality` of zero or more", "got a negative one, infinity or NaN", fix)
    return matrix, number, scale.astype(matrix.dtype)


def _check_semi_definite(similarity: ArrayLike) -> None:
    host = concrete(similarity)
    if host is None:
        return
    host = np.asarray(host, np.float64)
    if not np.isfinite(host).all():
        fix = "Leave out members with NaN predictions."
        raise value_error("a finite `similarity`", "got NaN or infinity", fix)
    tolerance = 1e-3 * np.abs(host).max()
    if np.abs(host - host.T).max() > tolerance or np.linalg.eigvalsh(host).min() < -tolerance:
        fix = "A matrix of disagreements? Pass `1 - disagreement`."
        got = "got one that is not"
        raise value_error("a symmetric, positive semi-definite `similarity`", got, fix)


def check_greedy(score: Any, row_weights: Any, num_steps: Any, num_initial: Any, num_members: int) -> Callable | None:
    """Raises for invalid options. Returns the score function; `None` for log scores."""
    check_positive_int(num_steps, "num_steps")
    if not isinstance(num_initial, int | np.integer) or num_initial != 0:
        check_positive_int(num_initial, "num_initial")
    if num_initial > min(num_steps, num_members):
        got = f"got {num_initial}, with {num_members} members and {num_steps} steps"
        raise value_error(
            "`num_initial` of at most `num_steps` and the number of members", got, "They are the first steps."
        )
    if callable(score):
        if row_weights is not None:
            fix = "Ignore those rows in the score itself."
            raise value_error("no `row_weights` with a score of your own", "got `row_weights`", fix)
        return score
    if not isinstance(score, str) or score != "log":
        fix = "Predictions come first, then the score of their mean."
        raise value_error('`score` to be "log" or a function of the combined prediction', f"got {score!r}", fix)
    return None


def check_sparsify(weights: ArrayLike, above: float, num_members: Any) -> np.ndarray:
    """Raises unless weights are concrete and valid, and `above` keeps a member. Returns them normalised, as float64."""
    if is_traced(weights):
        fix = "Call it outside `jax.jit`: how many members are left depends on the weights."
        raise type_error("weights whose values are known", "got a traced array", fix)
    check_plain_weights(weights)
    shape = np.shape(weights)
    if len(shape) != 1 or shape[0] < 1:
        raise value_error(
            "one weight per member, `(members,)`", f"got shape {shape}", "Weights are in the order of the members."
        )
    check_weights(weights, shape[0], jnp.dtype("float32"))
    if num_members is not None:
        check_positive_int(num_members, "num_members")
    exact = as_numpy(weights, "weights").astype(np.float64)
    exact = exact / exact.sum()
    check_number(above, "above")
    if not 0 <= above < exact.max():
        got = f"got above={above}; the largest weight is {exact.max():.3g} of a sum of 1"
        fix = "Only members whose normalised weight exceeds `above` are kept."
        raise value_error("a non-negative `above` below the largest weight", got, fix)
    return exact


def _where(wrong: np.ndarray) -> str:
    row = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"row {row}, the first of {int(wrong.sum())} such"
