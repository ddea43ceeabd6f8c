import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from .. import _check
from ._accumulate import add_up, normalise, number_dtype, result_dtype, sum_dtype
from ._check import check_trees
from ._check_weights import check_summable, check_tree_weights, check_weights_fit
from ._columns import map_columns
from ._compare import SUM_RULES, compare_trees

T = TypeVar("T")


def weighted_sum(trees: Iterable[T], weights: Sequence[Any] | jax.Array | np.ndarray) -> T:
    r"""The weighted sum of PyTrees of one structure.

    Each leaf of the result is $\sum_i w_i x_i$ of the corresponding leaves $x_i$, which have one shape:

    - Python ints, floats and complex numbers are summed as Python numbers: ints with int weights stay exact.
    - Integer and bool arrays with integer weights give the integer sum, in at least 32 bits (int8 and bool give
      int32); beyond these it wraps around, as everywhere in JAX. With float weights they give the default float type.
    - Float and complex arrays keep their type; those below 32 bits (bfloat16, float16) are summed in float32.
    - Everything else (functions, strings, bools) must be equal and is kept. A model whose configuration has Python
      ints among its leaves should be averaged instead, with [`eqx_ensemble.tree.weighted_mean`][].

    A tree of weight 0 is included: 0 times NaN is NaN. Remove such a tree from `trees` instead.

    **Arguments:**

    - `trees`: a list, tuple or iterator of PyTrees that differ only in their numbers.
    - `weights`: one finite real number per tree: a list, or an array `(trees,)`. They may be traced: the sum is
        differentiable in them, their values are then not checked, and Python numbers become arrays.

    **Returns:**

    A PyTree with the structure of the first tree.

    **Raises:**

    `ValueError` for a wrong number of weights, or one that is not finite or overflows the type of an integer sum;
    `MemberMismatchError` if the trees differ in structure, shapes, dtypes or static values; `TypeError` for PRNG keys,
    and for weights that are not real.

    ```python
    from eqx_ensemble.tree import weighted_sum

    weighted_sum([{"a": [1, 2]}, {"a": [3, 4]}], [1, 10])  # {"a": [31, 42]}
    ```
    """
    return combine_trees(trees, weights, name="tree.weighted_sum", mean=False)


def weighted_mean(trees: Iterable[T], weights: Sequence[Any] | jax.Array | np.ndarray | None = None) -> T:
    r"""The weighted mean of PyTrees of one structure.

    Each leaf of the result is $\sum_i w_i x_i / \sum_i w_i$, as in [`eqx_ensemble.tree.weighted_sum`][], except that
    integer and bool arrays always give floats, and that Python numbers that are equal in all trees (sizes, dropout
    rates) are kept unchanged.

    **Arguments:**

    - `trees`: a list, tuple or iterator of PyTrees that differ only in their numbers.
    - `weights`: one finite real number per tree, with a sum other than 0; they need not sum to 1. `None` for the
        plain mean.

    **Returns:**

    A PyTree with the structure of the first tree.

    **Raises:**

    As [`eqx_ensemble.tree.weighted_sum`][], and `ValueError` if the weights sum to 0.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble.tree import weighted_mean

    weighted_mean([{"w": jnp.zeros(2)}, {"w": jnp.ones(2)}], [1, 3])  # {"w": [0.75, 0.75]}
    ```
    """
    return combine_trees(trees, weights, name="tree.weighted_mean", mean=True)


def combine_trees(trees: Any, weights: Any, *, name: str, mean: bool) -> Any:
    """The weighted sum or mean; errors name the function `name`, on whose behalf it is computed."""
    trees = check_trees(trees, name=name)
    # Weights are optional for a mean only.
    weights = [1] * len(trees) if weights is None and mean else weights
    weights = check_tree_weights(weights, len(trees), name=name, mean=mean)
    columns = compare_trees(trees, name=name, rules=SUM_RULES)
    for path, leaves in zip(columns.paths, columns.leaves, strict=True):
        check_summable(leaves[0], path, name=name)
        if isinstance(weights, list) and not mean and _check.is_member_array(leaves[0]):
            check_weights_fit(weights, sum_dtype(leaves[0], weights), path, name=name)
    if mean:
        return map_columns(lambda leaves: _mean_column(leaves, weights), columns)
    return map_columns(lambda leaves: _sum_column(leaves, weights), columns)


def _sum_column(leaves: list, weights: Any) -> Any:
    first = leaves[0]
    if _check.is_member_array(first):
        return add_up(leaves, weights, sum_dtype(first, weights)).astype(result_dtype(first, weights))
    if not _check.is_number(first):
        return first
    if isinstance(weights, list):
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
    return add_up(leaves, weights, number_dtype(leaves, weights))


def _mean_column(leaves: list, weights: Any) -> Any:
    first = leaves[0]
    if _check.is_member_array(first):
        # A float weight makes integers sum to floats.
        dtype = sum_dtype(first, [1.0])
        return add_up(leaves, normalise(weights, dtype), dtype).astype(result_dtype(first, [1.0]))
    # Kept rather than computed: sizes and rates are configuration, which must neither round nor become a tracer.
    if not _check.is_number(first) or all(leaf == first for leaf in leaves):
        return first
    if isinstance(weights, list):
        return _sum_column(leaves, weights) / math.fsum(weights)
    dtype = number_dtype(leaves, [1.0])
    return add_up(leaves, normalise(weights, dtype), dtype)
