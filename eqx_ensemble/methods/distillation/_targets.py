from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from ..._axes import Each
from ..._caller import caller
from ..._check import (
    check_floating,
    check_integer,
    check_logits,
    check_number,
    concrete,
    promote,
    type_error,
    value_error,
)
from ..._ensemble import Ensemble
from ..._predict import predict
from ..._pytree import PyTree
from .._check import check_options

_FROM_PREDICT = "`methods.distillation.targets` returns them; of `predict`, `jnp.moveaxis(predictions, 0, 1)`."


def check_classes(logits: ArrayLike, teacher: ArrayLike, *, least: int) -> tuple[Array, ...]:
    """Returns the logits of one student `(*batch, classes)` and of its teachers `(members, *batch, classes)`.

    Raises for fewer than `least` teachers. The members of `teacher` are its second-to-last axis, with the rows first as
    in the data of `fit`.
    """
    student, known = check_logits(logits, members=False), check_floating("teacher", teacher)
    *rows, classes = student.shape
    expected = (*rows, known.shape[-2] if known.ndim > 1 else "members", classes)
    if known.shape != expected:
        got = f"expected ({', '.join(map(str, (*rows, 'members', classes)))}), got {known.shape}"
        raise value_error("`teacher` of shape (*batch, members, classes)", got, _FROM_PREDICT)
    _check_teachers(known.shape[-2], least)
    return promote(student, jnp.moveaxis(known, -2, 0))


def check_gaussians(mean: Array, teacher_mean: Any, teacher_variance: Any) -> tuple[Array, Array]:
    """Returns the means and variances of the teachers, each `(members, *batch)`."""
    found = []
    for argument, values in {"teacher_mean": teacher_mean, "teacher_variance": teacher_variance}.items():
        known = check_floating(argument, values)
        if known.ndim != mean.ndim + 1 or known.shape[:-1] != mean.shape:
            got = f"expected ({', '.join(map(str, (*mean.shape, 'members')))}), got {known.shape}"
            raise value_error(f"`{argument}` of shape (*batch, members)", got, _FROM_PREDICT)
        found.append(jnp.moveaxis(known, -1, 0))
    means, variances = found
    if means.shape != variances.shape:
        got = f"got {means.shape[0]} means and {variances.shape[0]} variances of each row"
        raise value_error("teachers with a mean and a variance each", got, _FROM_PREDICT)
    _check_teachers(means.shape[0], 1)
    return means, variances


def _check_teachers(count: int, least: int) -> None:
    if count < least:
        words = {1: "at least one teacher", 2: "at least two teachers"}[least]
        fix = "Was every member removed?"
        if least > 1:
            fix = "The Dirichlet likelihood of one teacher is unbounded. Use `methods.distillation.mixture_loss`."
        raise value_error(words, f"got {count}", fix)


def check_smoothing(smoothing: Any) -> float:
    """Raises unless `smoothing` is a number from 0 to below 1. Returns it."""
    number = check_number(smoothing, "smoothing", least=0)
    if number >= 1:
        raise ValueError(f"`{caller()}` needs `smoothing` below 1, got {smoothing!r}.")
    return number


def check_known(predictions: Any) -> None:
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
            raise value_error("teachers with predictions that are not NaN", got, fix)


def check_split(predictions: Any, num_students: Any) -> int:
    """Raises unless the teachers divide evenly. Returns the number of students."""
    count = check_integer(num_students, "num_students", least=1)
    leaves = jax.tree.leaves(predictions)
    if not leaves:
        raise type_error("an array of predictions", f"got {predictions!r}", _FROM_PREDICT)
    for leaf in leaves:
        shape = np.shape(leaf)
        if len(shape) < 2 or shape[1] % count or shape[1] == 0:
            got = f"got {count} students for predictions of shape {shape}"
            fix = "The members are the second axis. Leave some out, or choose a divisor of their number."
            raise value_error("a number of teachers divisible by `num_students`", got, fix)
    return count


def targets(ensemble: Ensemble[Any], x: PyTree, **options: Any) -> PyTree:
    """The predictions of all members with the rows first, for the data of [`eqx_ensemble.fit`][].

    No labels are needed: rows that the ensemble was not trained on are more informative.

    **Arguments:**

    - `ensemble`: the teachers.
    - `x`: the inputs, a PyTree of arrays `(rows, ...)`.
    - `options`: of [`eqx_ensemble.predict`][], except `combine` and `weights`.

    **Returns:** the predictions, each array `(rows, members, ...)`.

    **Raises:** `ValueError` for members with NaN predictions (where concrete).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    ee.methods.distillation.targets(ensemble, jnp.ones((10, 3))).shape  # (10, 4, 2)
    ```
    """
    check_options(options, ("combine", "weights"), "the losses combine the teachers")
    found = predict(ensemble, x, combine=_rows_first, **options)
    check_known(found)
    return found


def _rows_first(*predictions: Any) -> Any:
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), predictions)
    return moved[0] if len(moved) == 1 else moved


def split_targets(predictions: PyTree, num_students: int) -> PyTree:
    """Divides the teachers evenly among the students of a smaller ensemble, in order.

    If all students learnt from all teachers, they would agree, and the teachers' disagreement would be lost.

    **Arguments:**

    - `predictions`: from [`eqx_ensemble.methods.distillation.targets`][], arrays `(rows, members, ...)`.
    - `num_students`: the number of students, a divisor of the number of teachers.

    **Returns:** each array an [`eqx_ensemble.Each`][] `(students, rows, members / students, ...)`.

    ```python
    predictions = jnp.zeros((10, 6, 3))  # of six teachers
    ee.methods.distillation.split_targets(predictions, 2).value.shape  # (2, 10, 3, 3)
    ```
    """
    count = check_split(predictions, num_students)

    def split(x: Any) -> Each:
        array = jnp.asarray(x)
        groups = array.reshape(len(array), count, array.shape[1] // count, *array.shape[2:])
        return Each(jnp.moveaxis(groups, 1, 0))

    return jax.tree.map(split, predictions)
