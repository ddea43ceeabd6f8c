from typing import Any

import jax
import jax.numpy as jnp

from ..._axes import Each
from ..._ensemble import Ensemble
from ..._predict._predict import predict
from ..._pytree import PyTree
from ._check import check_known, check_predict_options, check_split


def targets(ensemble: Ensemble[Any], x: PyTree, **options: Any) -> PyTree:
    """The predictions of all members with the rows first, as targets for students.

    They are computed by [`eqx_ensemble.predict`][] in batches of rows. With the rows first, they can be used in the
    data of [`eqx_ensemble.fit`][]. No labels are needed: rows that the ensemble was not trained on are more
    informative.

    **Arguments:**

    - `ensemble`: the teachers.
    - `x`: the inputs, a PyTree of arrays `(rows, ...)`.
    - `options`: the options of [`eqx_ensemble.predict`][] except `combine` and `weights`, such as `batch_size`,
        `memory`, `state` and `fn`.

    **Returns:** the predictions, each array `(rows, members, ...)`.

    **Raises:** `TypeError` for `combine` and `weights`; `ValueError` for members with NaN predictions (where concrete).

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    ee.methods.distillation.targets(ensemble, jnp.ones((10, 3))).shape  # (10, 4, 2)
    ```
    """
    name = "methods.distillation.targets"
    check_predict_options(name, options)
    found = predict(ensemble, x, combine=_rows_first, **options)
    check_known(name, found)
    return found


def _rows_first(*predictions: Any) -> Any:
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), predictions)
    return moved[0] if len(moved) == 1 else moved


def split_targets(predictions: PyTree, num_students: int) -> PyTree:
    """Divides the teachers evenly among the students of a smaller ensemble, in order.

    Each student learns from its own teachers. If every student matches the mean of its teachers, the mean of the
    students is that of all teachers. If all students learnt from all teachers, they would agree with each other, and
    the disagreement between teachers would be lost.

    **Arguments:**

    - `predictions`: from [`eqx_ensemble.methods.distillation.targets`][], each array `(rows, members, ...)`.
    - `num_students`: the number of students, a divisor of the number of teachers.

    **Returns:** the predictions, each array an [`eqx_ensemble.Each`][] of shape
    `(students, rows, members / students, ...)`.

    **Raises:** `ValueError` if the teachers do not divide evenly; `TypeError` for predictions without arrays.

    ```python
    predictions = jnp.zeros((10, 6, 3))  # of six teachers
    ee.methods.distillation.split_targets(predictions, 2).value.shape  # (2, 10, 3, 3)
    ```
    """
    count = check_split("methods.distillation.split_targets", predictions, num_students)

    def split(x: Any) -> Each:
        array = jnp.asarray(x)
        groups = array.reshape(len(array), count, array.shape[1] // count, *array.shape[2:])
        return Each(jnp.moveaxis(groups, 1, 0))

    return jax.tree.map(split, predictions)
