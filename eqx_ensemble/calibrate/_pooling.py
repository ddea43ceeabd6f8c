from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from .._brief import brief_doc
from .._caller import caller
from .._check import (
    as_column,
    check_entries,
    check_fitted_members,
    check_labels,
    check_logits,
    check_number,
    check_row_weights,
    check_weights,
    check_word,
    concrete,
    is_traced,
    type_error,
    value_error,
)
from .._warnings import warn
from .._weighting import blank_unweighted, is_class, log_mixture


def check_best_temperature(pool: str, separated: ArrayLike, hopeless: ArrayLike) -> None:
    """Raises if the likelihood has no maximum at a finite, positive temperature; checked where concrete."""
    for flags, got, fix in (
        (
            separated,
            "every label already is the most likely class, so the likelihood increases as the temperature goes to zero",
            "Fit on more rows, with at least one wrong prediction.",
        ),
        (
            hopeless,
            "the labels are no more likely than by chance, so the likelihood increases with the temperature",
            "Are the labels in the order of the rows?",
        ),
    ):
        host = concrete(flags)
        if host is not None and host.any():
            raise value_error("labels for which an optimal temperature exists", f"{_member_text(pool, host)}{got}", fix)


def check_not_separable(pool: str, separable: ArrayLike) -> None:
    """Raises if the probabilities of a class separate its rows from the others; checked where concrete."""
    host = concrete(separable)
    if host is None or not host.any():
        return
    group, label = np.argwhere(host)[0]
    whose = f"member {group}, class {label}" if pool == "members" else f"class {label}"
    got = f"{whose}: its probabilities separate its rows from the others, or all or none of the rows are of this class"
    fix = "Fit on more rows, or use `calibrate.platt`: its smoothed targets always have an optimum."
    raise value_error("labels for which optimal parameters exist", got, fix)


def check_scale(pool: str, scale: ArrayLike) -> None:
    """Raises unless the factor is finite and positive; checked where concrete."""
    host = concrete(scale)
    if host is not None and not np.isfinite(host).all():
        wrong = ~np.isfinite(host)
        got = f"{_member_text(pool, wrong)}the factor would be {host[wrong][0]}"
        raise value_error(
            "finite means and variances", got, "Exclude such members by `weights`, and such rows by `row_weights`."
        )
    if host is not None and (host == 0).any():
        fix = "Are the targets the predictions themselves?"
        raise value_error(
            "targets that differ from the predicted means",
            f"{_member_text(pool, host == 0)}every target equals its mean exactly",
            fix,
        )


def no_gradient_message(name: str) -> str:
    """The message for a fit by a loop of dynamic length, which cannot be differentiated."""
    return (
        f"`{name}` has no gradient with respect to the logits that it is fitted on.\n"
        "Fit on `jax.lax.stop_gradient(logits)`; the fitted Module is differentiable, and so is the fit of "
        "`calibrate.temperature`."
    )


def check_untraced(**arrays: ArrayLike | None) -> None:
    """Raises for traced arrays."""
    for argument, values in arrays.items():
        if is_traced(values):
            fix = "Fit outside `jax.jit`; the fitted Module can be called inside."
            raise type_error(f"a concrete `{argument}`", "got a traced array", fix)


def check_smoothing(smoothing: Any) -> float:
    """Raises unless `smoothing` is a non-negative number. Returns it."""
    check_number(smoothing, "smoothing", least=0)
    return float(smoothing)


def warn_of_no_minimum(pool: str, flat: ArrayLike, fix: str) -> None:
    """Warns if L-BFGS did not reach a minimum; checked where concrete."""
    host = concrete(flat)
    if host is not None and not host.all():
        warn(
            f"`{caller()}`: {_member_text(pool, ~host)}no minimum was reached. If the rows are separable, none exists: "
            f"fit on more rows, use a calibration with fewer parameters, or {fix}."
        )


def _member_text(pool: str, flags: np.ndarray) -> str:
    return f"member {int(np.argmax(flags))}: " if pool == "members" else ""


Pool = Literal["members", "mixture"]


class Pooling(eqx.Module):
    """The predictions to calibrate: each member separately, or their mixture as an ensemble of one.

    **Attributes:**

    - `pool`: `"members"` or `"mixture"`.
    - `num_members`: the number of members.
    - `weights`: the weights of the mixture, `(members,)`, or `None`.
    """

    pool: Pool = eqx.field(static=True)
    num_members: int = eqx.field(static=True)
    weights: Float[Array, " members"] | None

    __pdoc__ = brief_doc

    def logs(self, logits: ArrayLike) -> Float[Array, "groups *batch classes"]:
        """The log-probabilities to calibrate, with one group per member, or one for the mixture."""
        checked = check_logits(logits)
        check_fitted_members(self.num_members, checked.shape[0])
        return _logs(checked, self.weights, self.pool)


class Rows(NamedTuple):
    """Log-probabilities, labels and row weights, with all rows on one axis."""

    logs: Float[Array, "groups rows classes"]
    labels: Integer[Array, " rows"]
    weights: Bool[Array, " rows"] | Float[Array, " rows"]

    @property
    def share(self) -> Float[Array, " rows"]:
        """The weight of each row in the mean."""
        return self.weights.astype(self.logs.dtype) / jnp.sum(self.weights).astype(self.logs.dtype)


def fit_rows(
    logits: ArrayLike, labels: ArrayLike, pool: Pool, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> tuple[Pooling, Rows]:
    """The predictions to calibrate and the rows to fit on; ignored rows and invalid labels have weight zero."""
    checked = check_logits(logits)
    counted = check_row_weights(row_weights, checked.shape[1:-1], reduction="mean")
    targets = check_labels(labels, checked, counted)
    pooling = make_pooling(pool, weights, checked)
    share = None if pooling.weights is None else concrete(pooling.weights)
    if share is not None or pooling.weights is None:
        of_members = True if share is None else as_column(share > 0, checked.ndim)
        is_wrong = lambda host: ~np.isfinite(host) & of_members
        fix = "Probabilities of zero? Mix in a little of the uniform distribution before taking the logarithm."
        check_entries("finite `logits`", checked, is_wrong, fix, counted.known_along(checked.ndim - 1))
    # While tracing, invalid labels raise no error.
    known = counted.blank(is_class(targets, checked.shape[-1]), fill=False)
    counted = counted._replace(counted=known)
    own = counted.weights
    own = known if own is None or own.dtype == bool else counted.blank(own).astype(checked.dtype)
    logs = _logs(counted.blank(checked, before=1), pooling.weights, pool)
    flat = jnp.reshape(logs, (logs.shape[0], -1, logs.shape[-1]))
    return pooling, Rows(flat, jnp.ravel(counted.blank(targets)), jnp.ravel(own))


def make_pooling(pool: Pool, weights: ArrayLike | None, predictions: Array) -> Pooling:
    """The pooling of predictions with a leading `members` axis."""
    check_word(pool, "pool", ("members", "mixture"))
    if (weights is not None) and pool == "members":
        fix = "Each member is calibrated separately: weight the members when you combine them."
        raise value_error('`weights` only with `pool="mixture"`', 'got both `weights` and `pool="members"`', fix)
    num_members = predictions.shape[0]
    return Pooling(pool, num_members, check_weights(weights, num_members, predictions.dtype))


def _logs(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None, pool: Pool
) -> Float[Array, "groups *batch classes"]:
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    return logs if pool == "members" else log_mixture(logs, weights)[None]
