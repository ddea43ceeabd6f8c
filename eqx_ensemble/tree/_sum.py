import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _leaves
from .._caller import caller
from .._foreign import from_foreign
from .._leaf_text import leaf_text
from .._leaves import is_key, is_member_array, is_traced
from ._check import check_trees
from ._compare import POLYAK_RULES, SUM_RULES, compare_trees
from ._index import map_columns


def check_tree_weights(weights: Any, count: int, *, mean: bool = False) -> list | jax.Array:
    """Raises unless there is one finite real weight per tree, checked on the host.

    **Returns:** a list of Python ints and floats; a traced vector unchanged and unchecked.
    """
    values = _values(weights)
    if len(values) != count:
        raise ValueError(f"`{caller()}` needs one weight per tree; got {count} trees and {len(values)} weights.")
    if is_traced(values):
        return values
    for i, value in enumerate(values):
        if not isinstance(value, (int, float)):
            raise TypeError(f"`{caller()}` needs real weights; weight {i} is {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"`{caller()}` needs finite weights; weight {i} is {value}.")
    if mean and math.fsum(values) == 0:
        raise ValueError(f"`{caller()}` divides by the sum of the weights, which is 0: {values}.")
    return values


def _values(weights: Any) -> Any:
    weights = from_foreign(weights, "weights")
    if isinstance(weights, (list, tuple)):
        if any(is_traced(w) for w in weights):
            with jax.numpy_dtype_promotion("standard"):
                return jnp.stack([jnp.asarray(w) for w in weights])
        return [_number(w.tolist()) if is_member_array(w) else _number(w) for w in weights]
    if not is_member_array(weights) or weights.ndim == 0:
        kind = leaf_text(weights) if is_member_array(weights) else f"`{type(weights).__name__}`"
        raise TypeError(f"`{caller()}` needs a list or a one-dimensional array of weights, one per tree; got {kind}.")
    if weights.ndim > 1:
        raise ValueError(
            f"`{caller()}` needs one weight per tree, in a one-dimensional array; got {leaf_text(weights)}."
        )
    if is_traced(weights):
        return weights
    return [_number(value) for value in np.asarray(weights).tolist()]


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def check_weights_fit(weights: list, dtype: Any, path: str) -> None:
    """Raises for integer weights that overflow the integer type in which the leaf at `path` is summed."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return
    limits = jnp.iinfo(dtype)
    wrong = [w for w in weights if not limits.min <= w <= limits.max]
    if wrong:
        raise ValueError(
            f"`{caller()}`: weight {wrong[0]} does not fit {jnp.dtype(dtype).name}, in which `{path}` is summed."
        )


def _step(total, weight, leaf, dtype):
    leaf = leaf.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # Real and imaginary part apart: multiplying by `weight + 0j` would turn an infinite part into NaN.
        term = jax.lax.complex(weight * leaf.real, weight * leaf.imag)
    else:
        term = weight * leaf
    return total + term


# One small program per leaf shape, whatever the number of trees.
_add = jax.jit(_step, static_argnums=3)


def add_up(leaves: list, weights: Any, dtype: Any) -> jax.Array:
    """The weighted sum of arrays of one shape (or of Python numbers), computed in `dtype`."""
    total = np.zeros(np.shape(leaves[0]), dtype)
    for i, leaf in enumerate(leaves):
        weight = weights[i]
        # NumPy rounds a Python number once, to the right type.
        listed = isinstance(weights, list)
        weight = np.asarray(weight, _real(dtype)) if listed else weight.astype(_real(dtype))
        leaf = leaf if _leaves.is_member_array(leaf) else np.asarray(leaf, dtype)
        total = _add(total, weight, leaf, dtype)
    return jnp.asarray(total)


def normalise(weights: Any, dtype: Any) -> Any:
    """Weights that sum to 1: Python floats, or if traced an array of the real type of `dtype`."""
    if isinstance(weights, list):
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    weights = weights.astype(_real(dtype))
    return weights / jnp.sum(weights)


def sum_dtype(leaf: Any, weights: Any) -> Any:
    """The type in which arrays like `leaf` are summed: at least 32 bits wide."""
    dtype = _leaves.member_dtype(leaf)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype
    if not _all_integer(weights):
        return _default(float)
    if dtype == np.bool_ or jnp.iinfo(dtype).bits < 32:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return dtype
    positive = isinstance(weights, list) and min(weights) >= 0
    return dtype if positive else _default(int)


def result_dtype(leaf: Any, weights: Any) -> Any:
    """The type of the sum of arrays like `leaf`: their own for floats."""
    dtype = _leaves.member_dtype(leaf)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else sum_dtype(leaf, weights)


def number_dtype(leaves: list, weights: Any) -> Any:
    """The type of a sum of Python numbers with traced weights."""
    if any(isinstance(leaf, complex) for leaf in leaves):
        return _default(complex)
    whole = all(isinstance(leaf, int) for leaf in leaves) and _all_integer(weights)
    return _default(int if whole else float)


def _all_integer(weights: Any) -> bool:
    if isinstance(weights, list):
        return all(isinstance(weight, int) for weight in weights)
    return bool(jnp.issubdtype(weights.dtype, jnp.integer) or weights.dtype == np.bool_)


def _default(kind: type) -> Any:
    return jax.dtypes.canonicalize_dtype(np.dtype(kind))


def _real(dtype: Any) -> Any:
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


T = TypeVar("T")


def polyak(old: T, new: T, tau: Any) -> T:
    r"""Takes a step of a Polyak average, as for target networks: moves `old` towards `new` by the fraction `tau`.

    Each floating-point or complex array becomes $\tau\, x_{new} + (1 - \tau)\, x_{old}$ in its own dtype, as in
    `optax.incremental_update`. Other arrays, such as counters and keys, are taken from `new`.

    **Arguments:**

    - `old`, `new`: PyTrees that differ only in the values of their arrays: a target ensemble and the trained one.
    - `tau`: one number from 0 (`old`) to 1 (`new`). It may be traced; then its value is not checked.

    **Returns:** a PyTree with the structure of `old`.

    **Raises:** `MemberMismatchError` if the trees differ in structure, shapes, dtypes or static values;
    `ValueError` for a `tau` that is not one number from 0 to 1.

    ```python
    online = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    target = online  # arrays are immutable
    target = ee.tree.polyak(target, online, 0.005)  # after every step
    ```
    """
    if np.ndim(tau) or not (_leaves.is_traced(tau) or 0 <= float(tau) <= 1):
        raise ValueError(f"`{caller()}` needs one number from 0 to 1 as `tau`, got {leaf_text(tau)}.")
    columns = compare_trees([old, new], rules=POLYAK_RULES)
    # Python numbers are rounded once, to each leaf's type: `1 - tau` of a rounded `tau` is another weight.
    weights = jnp.stack([1 - tau, tau]) if isinstance(tau, jax.Array) else [1 - float(tau), float(tau)]
    return map_columns(lambda leaves: _move_column(leaves, weights), columns)


def _move_column(leaves: list, weights: Any) -> Any:
    old, new = leaves
    if not _leaves.is_member_array(new):
        return old
    if not jnp.issubdtype(_leaves.member_dtype(new), jnp.inexact):
        return new
    dtype = sum_dtype(new, weights)
    return add_up(leaves, weights, dtype).astype(result_dtype(new, weights))


def weighted_sum(trees: Iterable[T], weights: Sequence[Any] | jax.Array | np.ndarray) -> T:
    r"""The weighted sum of PyTrees of one structure.

    Each leaf of the result is $\sum_i w_i x_i$ of the corresponding leaves $x_i$, which have one shape:

    - Python numbers stay Python numbers.
    - Integer and bool arrays with integer weights give integers of at least 32 bits; with float weights, floats.
    - Float and complex arrays keep their type; those below 32 bits are summed in float32.
    - Everything else (functions, strings, bools) must be equal and is kept.

    A tree of weight 0 counts: 0 times NaN is NaN.

    **Arguments:**

    - `trees`: PyTrees that differ only in their numbers.
    - `weights`: one finite real number per tree, `(trees,)`. The sum is differentiable in them; traced ones are not
        checked.

    **Returns:** a PyTree with the structure of the first tree.

    **Raises:** `ValueError` for a wrong number of weights, or one that is not finite or overflows an integer sum;
    `MemberMismatchError` if the trees differ in structure, shapes, dtypes or static values; `TypeError` for PRNG keys,
    and for weights that are not real.

    ```python
    ee.tree.weighted_sum([{"a": [1, 2]}, {"a": [3, 4]}], [1, 10])  # {"a": [31, 42]}
    ```
    """
    return combine_trees(trees, weights, mean=False)


def weighted_mean(trees: Iterable[T], weights: Sequence[Any] | jax.Array | np.ndarray | None = None) -> T:
    r"""The weighted mean of PyTrees of one structure.

    Each leaf of the result is $\sum_i w_i x_i / \sum_i w_i$, as in [`eqx_ensemble.tree.weighted_sum`][], except that
    integer and bool arrays always give floats, and that Python numbers that are equal in all trees are kept unchanged.

    **Arguments:**

    - `trees`: PyTrees that differ only in their numbers.
    - `weights`: one finite real number per tree, with a sum other than 0. `None` for the plain mean.

    **Returns:** a PyTree with the structure of the first tree.

    **Raises:** as [`eqx_ensemble.tree.weighted_sum`][], and `ValueError` if the weights sum to 0.

    ```python
    ee.tree.weighted_mean([{"w": jnp.zeros(2)}, {"w": jnp.ones(2)}], [1, 3])  # {"w": [0.75, 0.75]}
    ```
    """
    return combine_trees(trees, weights, mean=True)


def combine_trees(trees: Any, weights: Any, *, mean: bool) -> Any:
    """The weighted sum or mean; errors name the function `name`, on whose behalf it is computed."""
    trees = check_trees(trees)
    # Weights are optional for a mean only.
    weights = [1] * len(trees) if weights is None and mean else weights
    weights = check_tree_weights(weights, len(trees), mean=mean)
    columns = compare_trees(trees, rules=SUM_RULES)
    for path, leaves in zip(columns.paths, columns.leaves, strict=True):
        if is_key(leaves[0]):
            raise TypeError(
                f"`{caller()}` cannot add PRNG keys; `{path}` is {leaf_text(leaves[0])}.\n"
                "Take the keys out first (`equinox.partition`), or sum their trees without them."
            )
        if isinstance(weights, list) and not mean and _leaves.is_member_array(leaves[0]):
            check_weights_fit(weights, sum_dtype(leaves[0], weights), path)
    if mean:
        return map_columns(lambda leaves: _mean_column(leaves, weights), columns)
    return map_columns(lambda leaves: _sum_column(leaves, weights), columns)


def _sum_column(leaves: list, weights: Any) -> Any:
    first = leaves[0]
    if _leaves.is_member_array(first):
        return add_up(leaves, weights, sum_dtype(first, weights)).astype(result_dtype(first, weights))
    if not _leaves.is_number(first):
        return first
    if isinstance(weights, list):
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))
    return add_up(leaves, weights, number_dtype(leaves, weights))


def _mean_column(leaves: list, weights: Any) -> Any:
    first = leaves[0]
    if _leaves.is_member_array(first):
        # A float weight makes integers sum to floats.
        dtype = sum_dtype(first, [1.0])
        return add_up(leaves, normalise(weights, dtype), dtype).astype(result_dtype(first, [1.0]))
    # Kept rather than computed: sizes and rates are configuration, which must neither round nor become a tracer.
    if not _leaves.is_number(first) or all(leaf == first for leaf in leaves):
        return first
    if isinstance(weights, list):
        return _sum_column(leaves, weights) / math.fsum(weights)
    dtype = number_dtype(leaves, [1.0])
    return add_up(leaves, normalise(weights, dtype), dtype)
