from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._check import (
    check_array,
    check_fitted_members,
    check_mask,
    check_number,
    check_positive_int,
    check_values,
    concrete,
    first_text,
    kept_rows,
    needs_message,
)


def check_features(name: str, features: Any, mask: Any) -> tuple[Array, Array | None]:
    """Raises unless features are `(members, batch, hidden)` and finite where unmasked. Returns them and the mask."""
    array = check_values(name, "features", features)
    if array.ndim != 3 or 0 in array.shape:
        fix = "Flatten what is not one row of numbers: `features.reshape(members, batch, -1)`."
        raise ValueError(
            needs_message(name, "`features` of shape (members, batch, hidden)", f"got shape {array.shape}", fix)
        )
    kept = check_mask(name, mask, array.shape[1:2])
    host, rows = concrete(array), kept_rows(mask)
    if host is not None and rows is not None:
        wrong = ~np.isfinite(host) & (rows[:, None] if rows.ndim else True)
        if wrong.any():
            fix = "Leave members that diverged out, and rows with NaN by `mask`."
            raise ValueError(needs_message(name, "finite `features`", first_text(host, wrong), fix))
    return array, kept


def check_classes(name: str, labels: Any, features: Array, num_classes: Any, mask: Any) -> Array:
    """Raises unless labels are integers below `num_classes`, with two rows per class (if concrete). Returns them."""
    count = check_positive_int(num_classes, "num_classes", name=name)
    array = check_array(name, "labels", labels)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape != features.shape[1:2]:
        got = f"expected integers {features.shape[1:2]}, got {array.dtype} of shape {array.shape}"
        fix = "One-hot labels? Pass `jnp.argmax(labels, axis=-1)`."
        raise (TypeError if array.shape == features.shape[1:2] else ValueError)(
            needs_message(name, "one label per row of the features", got, fix)
        )
    host, kept = concrete(labels), kept_rows(mask)
    if host is not None and kept is not None:
        wrong = ((host < 0) | (host >= count)) & kept
        if wrong.any():
            fix = "Count classes from 0; leave rows without a class out by `mask`."
            raise ValueError(needs_message(name, f"labels from 0 to {count - 1}", first_text(host, wrong), fix))
        rows = np.bincount(host[np.broadcast_to(kept, host.shape)], minlength=count)
        if (rows < 2).any():
            few = np.flatnonzero(rows < 2).tolist()
            fix = "Classes that are not in these rows have no density: number the others without gaps."
            raise ValueError(needs_message(name, "at least two rows of each class", f"got fewer of classes {few}", fix))
    return array.astype(jnp.int32)


def check_ridge(name: str, ridge: Any, dtype: jnp.dtype) -> Array:
    """Raises unless `ridge` is a number of at least 0. Returns it as an array."""
    return jnp.asarray(check_number(ridge, "ridge", name=name, least=0), dtype)


def check_factors(name: str, factors: Array) -> None:
    """Raises for singular covariances of any member or class (if concrete)."""
    host = concrete(factors)
    if host is not None and not np.isfinite(host).all():
        wrong = ~np.isfinite(host).all(axis=(-2, -1))
        member = int(np.argwhere(wrong)[0][0])
        fix = (
            "Hidden units that are constant, or fewer rows than hidden units? Pass a (larger) `ridge`, or reduce them."
        )
        raise ValueError(needs_message(name, "covariances that are not singular", f"got one of member {member}", fix))


def check_new_features(name: str, features: Any, centre: Array) -> Array:
    """Raises unless features belong to the fitted members and have as many hidden units. Returns them."""
    array = check_values(name, "features", features)
    check_fitted_members(name, centre.shape[0], array.shape[0])
    if array.ndim != 3 or array.shape[2] != centre.shape[1]:
        got = f"expected (members, batch, hidden) with hidden {centre.shape[1]}, got {array.shape}"
        raise ValueError(needs_message(name, "features like those that it was fitted on", got, "Take the same layer."))
    return array
