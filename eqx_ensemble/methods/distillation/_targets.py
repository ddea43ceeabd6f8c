from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from ..._caller import caller
from ..._check import check_floating, check_logits, is_traced, promote, value_error
from ..._ensemble import Ensemble
from ..._marks import Each
from ..._predict import predict
from ..._pytree import PyTree

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


def targets(ensemble: Ensemble[Any], x: PyTree, **options: Any) -> PyTree:
    """The predictions of all members with the rows first, for the data of [`eqx_ensemble.fit`][].

    No labels are needed: rows that the ensemble was not trained on are more informative.

    **Arguments:**

    - `ensemble`: the teachers.
    - `x`: the inputs, a PyTree of arrays `(rows, ...)`.
    - `options`: of [`eqx_ensemble.predict`][], except `combine` and `weights`: the losses combine the teachers.

    **Returns:** the predictions, each array `(rows, members, ...)`.

    **Raises:** `ValueError` for members with NaN predictions (where concrete).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    ee.methods.distillation.targets(ensemble, jnp.ones((10, 3))).shape  # (10, 4, 2)
    ```
    """
    found = predict(ensemble, x, **options)
    leaves = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating) and not is_traced(x)]
    if leaves:
        diverged = np.any([jnp.isnan(x).reshape(len(x), -1).any(axis=1) for x in leaves], axis=0)
        if diverged.any():
            raise ValueError(
                f"`{caller()}` needs teachers whose predictions are not NaN; those of members "
                f"{np.flatnonzero(diverged).tolist()} are.\n"
                "Leave out members that diverged: `run.ensemble[run.status == ee.train.Status.OK]`."
            )
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)


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

    def split(x: Any) -> Each:
        array = jnp.asarray(x)
        if array.shape[1] % num_students:
            raise ValueError(f"`{caller()}` cannot divide {array.shape[1]} teachers among {num_students} students.")
        groups = array.reshape(len(array), num_students, array.shape[1] // num_students, *array.shape[2:])
        return Each(jnp.moveaxis(groups, 1, 0))

    return jax.tree.map(split, predictions)
