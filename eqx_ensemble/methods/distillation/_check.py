from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..._check import check_floating, check_integer, check_logits, check_number, concrete, needs_message, promote
from .._check import check_options

_FROM_PREDICT = "`methods.distillation.targets` returns them; of `predict`, `jnp.moveaxis(predictions, 0, 1)`."


def check_classes(name: str, logits: ArrayLike, teacher: ArrayLike, *, least: int) -> tuple[Array, ...]:
    """Returns the logits of one student `(*batch, classes)` and of its teachers `(members, *batch, classes)`.

    Raises for fewer than `least` teachers. The members of `teacher` are its second-to-last axis, with the rows first as
    in the data of `fit`.
    """
    student, known = check_logits(name, logits, members=False), check_floating(name, "teacher", teacher)
    *rows, classes = student.shape
    expected = (*rows, known.shape[-2] if known.ndim > 1 else "members", classes)
    if known.shape != expected:
        got = f"expected ({', '.join(map(str, (*rows, 'members', classes)))}), got {known.shape}"
        raise ValueError(needs_message(name, "`teacher` of shape (*batch, members, classes)", got, _FROM_PREDICT))
    _check_teachers(name, known.shape[-2], least)
    return promote(student, jnp.moveaxis(known, -2, 0))


def check_gaussians(name: str, mean: Array, teacher_mean: Any, teacher_variance: Any) -> tuple[Array, Array]:
    """Returns the means and variances of the teachers, each `(members, *batch)`."""
    found = []
    for argument, values in {"teacher_mean": teacher_mean, "teacher_variance": teacher_variance}.items():
        known = check_floating(name, argument, values)
        if known.ndim != mean.ndim + 1 or known.shape[:-1] != mean.shape:
            got = f"expected ({', '.join(map(str, (*mean.shape, 'members')))}), got {known.shape}"
            raise ValueError(needs_message(name, f"`{argument}` of shape (*batch, members)", got, _FROM_PREDICT))
        found.append(jnp.moveaxis(known, -1, 0))
    means, variances = found
    if means.shape != variances.shape:
        got = f"got {means.shape[0]} means and {variances.shape[0]} variances of each row"
        raise ValueError(needs_message(name, "teachers with a mean and a variance each", got, _FROM_PREDICT))
    _check_teachers(name, means.shape[0], 1)
    return means, variances


def _check_teachers(name: str, count: int, least: int) -> None:
    if count < least:
        words = {1: "at least one teacher", 2: "at least two teachers"}[least]
        fix = "Was every member removed?"
        if least > 1:
            fix = "The Dirichlet likelihood of one teacher is unbounded. Use `methods.distillation.mixture_loss`."
        raise ValueError(needs_message(name, words, f"got {count}", fix))


def check_smoothing(name: str, smoothing: Any) -> float:
    """Raises unless `smoothing` is a number from 0 to below 1. Returns it."""
    number = check_number(smoothing, "smoothing", name=name, least=0)
    if number >= 1:
        raise ValueError(f"`{name}` needs `smoothing` below 1, got {smoothing!r}.")
    return number


def check_predict_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises for options of `predict` that would combine the teachers."""
    check_options(options, ("combine", "weights"), "the losses combine the teachers", name=name)


def check_known(name: str, predictions: Any) -> None:
    """Raises for teachers with NaN predictions `(rows, members, ...)` (if concrete)."""
    for leaf in jax.tree.leaves(predictions):
        host = concrete(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else None
        if host is None:
            continue
        # NumPy does not treat bfloat16 as a floating-point type.
        unknown = np.flatnonzero(np.isnan(host.astype(np.float32)).any(axis=(0, *range(2, host.ndim))))
        if unknown.size:
            indices = ", ".join(map(str, unknown.tolist()))
            got = f"got NaN from {unknown.size} of {host.shape[1]}, at index {indices}"
            fix = "Leave out members that diverged: `run.ensemble[run.status == ee.train.Status.OK]`."
            raise ValueError(needs_message(name, "teachers with predictions that are not NaN", got, fix))


def check_split(name: str, predictions: Any, num_students: Any) -> int:
    """Raises unless the teachers divide evenly. Returns the number of students."""
    count = check_integer(num_students, "num_students", name=name, least=1)
    leaves = jax.tree.leaves(predictions)
    if not leaves:
        raise TypeError(needs_message(name, "an array of predictions", f"got {predictions!r}", _FROM_PREDICT))
    for leaf in leaves:
        shape = np.shape(leaf)
        if len(shape) < 2 or shape[1] % count or shape[1] == 0:
            got = f"got {count} students for predictions of shape {shape}"
            fix = "The members are the second axis. Leave some out, or choose a divisor of their number."
            raise ValueError(needs_message(name, "a number of teachers divisible by `num_students`", got, fix))
    return count
