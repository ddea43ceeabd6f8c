import warnings

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_word,
    concrete,
    first_text,
    is_traced,
    kept_rows,
    needs_message,
)


def check_pool(name: str, pool: str, *, weighted: bool) -> None:
    """Before or after combination, and weights only where there is a combination."""
    check_word(pool, "pool", ("members", "mixture"), name=name)
    if weighted and pool == "members":
        fix = "Every member is calibrated by itself: weight the members when you combine them."
        raise ValueError(
            needs_message(name, '`weights` only with `pool="mixture"`', 'got both `weights` and `pool="members"`', fix)
        )


def check_finite_logits(name: str, logits: Array, weights: ArrayLike | None, mask: ArrayLike | None) -> None:
    """Finite logits of members and rows that count; only where they are concrete."""
    host, kept, share = concrete(logits), kept_rows(mask), None if weights is None else concrete(weights)
    if host is None or kept is None or (weights is not None and share is None):
        return
    counts = np.broadcast_to(kept, host.shape[1:-1])[None, ..., None]
    if share is not None:
        counts = counts & (share > 0).reshape((-1,) + (1,) * (host.ndim - 1))
    wrong = ~np.isfinite(host) & counts
    if wrong.any():
        fix = "Probabilities of zero? Mix a little of the uniform distribution in before you take their logarithm."
        raise ValueError(
            needs_message(
                name,
                "finite `logits`",
                first_text(host, wrong),
                fix,
            )
        )


def check_best_temperature(name: str, pool: str, separated: ArrayLike, hopeless: ArrayLike) -> None:
    """A finite temperature above zero is best for all; only where that is concrete."""
    for flags, got, fix in (
        (
            separated,
            "every label is the most likely class already, so that ever smaller temperatures are better",
            "Fit on more rows: one that the prediction gets wrong is enough.",
        ),
        (
            hopeless,
            "the labels are not more likely than by chance, so that ever larger temperatures are better",
            "Are the labels those of these rows, in their order?",
        ),
    ):
        host = concrete(flags)
        if host is not None and host.any():
            raise ValueError(
                needs_message(name, "labels for which one temperature is best", f"{_member_text(pool, host)}{got}", fix)
            )


def check_finite_targets(name: str, targets: ArrayLike, mask: ArrayLike | None) -> None:
    """Finite targets in rows that count; only where they are concrete."""
    host, kept = concrete(targets), kept_rows(mask)
    if host is None or kept is None:
        return
    wrong = ~np.isfinite(host.astype(np.float64)) & kept
    if wrong.any():
        raise ValueError(
            needs_message(
                name, "finite `targets`", first_text(host, wrong), "Leave these rows out: `mask=jnp.isfinite(targets)`."
            )
        )


def check_scale(name: str, pool: str, scale: ArrayLike) -> None:
    """A factor that is finite and above zero; only where it is concrete."""
    host = concrete(scale)
    if host is not None and not np.isfinite(host).all():
        wrong = ~np.isfinite(host)
        got = f"{_member_text(pool, wrong)}the factor would be {host[wrong][0]}"
        raise ValueError(
            needs_message(
                name,
                "finite means and variances",
                got,
                "Leave broken members out (`weights`), and broken rows by `mask`.",
            )
        )
    if host is not None and (host == 0).any():
        fix = "Are the targets the predictions themselves?"
        raise ValueError(
            needs_message(
                name,
                "targets that differ from their means",
                f"{_member_text(pool, host == 0)}every target is hit exactly",
                fix,
            )
        )


def no_gradient_message(name: str) -> str:
    """The fit, a loop of steps whose number is not known, cannot be differentiated."""
    return (
        f"`{name}` has no gradient with respect to the logits that it is fitted on.\n"
        "Fit on `jax.lax.stop_gradient(logits)`; what is fitted can be differentiated, and so can the fit of "
        "`calibrate.temperature`."
    )


def check_untraced(name: str, **arrays: ArrayLike | None) -> None:
    """Arrays whose values are known."""
    for argument, values in arrays.items():
        if is_traced(values):
            fix = "Fit before `jax.jit`; what is fitted can be called inside."
            raise TypeError(needs_message(name, f"`{argument}` whose values are known", "got a traced array", fix))


def warn_of_no_minimum(name: str, pool: str, flat: ArrayLike) -> None:
    """Says where L-BFGS did not get to a minimum; only where that is concrete."""
    host = concrete(flat)
    if host is not None and not host.all():
        warnings.warn(
            f"`{name}`: {_member_text(pool, ~host)}no minimum was reached. Where the rows can be told apart without "
            "error there is none: fit on more rows, take a calibration with fewer parameters, or a penalty.",
            stacklevel=3,
        )


def _member_text(pool: str, flags: np.ndarray) -> str:
    return f"member {int(np.argmax(flags))}: " if pool == "members" else ""
