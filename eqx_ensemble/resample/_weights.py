from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float32, Int, Int32

from .._check import value_error
from .._keys import generators
from ._check import check_draw, check_draw_size, check_num_rows, check_row_labels, check_rows


def bootstrap(
    num_rows: int, num_members: int, *, size: int | float | None = None, stratify: Any = None, key: Any
) -> Int32[Array, "members size"]:
    r"""Bootstrap: rows drawn with replacement, uniformly and independently for each member.

    A member misses a fraction $(1 - 1/n)^n \approx 0.37$ of the rows, its out-of-bag rows: see
    [`eqx_ensemble.resample.out_of_bag`][]. To draw whole groups of rows see [`eqx_ensemble.resample.counts`][].

    **Arguments:**

    - `num_rows`, `num_members`: the numbers of rows, `len(x)`, and of members.
    - `size`: the rows per member, a count (which may exceed `num_rows`) or a fraction, rounded; by default `num_rows`.
    - `stratify`: discrete labels `(rows,)`: rows are drawn within each class. Without `size`, entry `i` is of the class
        of row `i`; with `size`, class proportions are kept, up to rounding.
    - `key`: one key.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`.

    **Raises:**

    - `ValueError` for a `size` without rows of every class.

    ```python
    ee.resample.bootstrap(100, 8, key=key).shape  # (8, 100)
    ```

    ??? cite
        [Breiman 1996](https://doi.org/10.1007/BF00058655)
    """
    num_rows, num_members = check_draw(num_rows, num_members, key)
    count = num_rows if size is None else check_draw_size(size, num_rows, replace=True)
    streams = generators(key, num_members, purpose="bootstrap")
    if stratify is None:
        return _stack_rows([stream.integers(num_rows, size=count) for stream in streams])

    names, classes = check_row_labels("stratify", stratify, num_rows)
    by_class, sizes = np.argsort(classes, kind="stable"), np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    wanted = np.repeat(np.arange(len(sizes)), _shares(names, sizes, count))
    drawn = []
    for stream in streams:
        own = classes if size is None else stream.permutation(wanted)
        drawn.append(by_class[starts[own] + stream.integers(sizes[own])])
    return _stack_rows(drawn)


def subsets(
    num_rows: int, num_members: int, *, size: int | float, stratify: Any = None, key: Any
) -> Int32[Array, "members size"]:
    """Subsets: rows drawn without replacement, in random order; every subset of `size` rows is equally likely.

    **Arguments:**

    - `num_rows`, `num_members`, `key`: as for [`eqx_ensemble.resample.bootstrap`][].
    - `size`: the rows per member, a count or a fraction of `num_rows`, rounded.
    - `stratify`: discrete labels `(rows,)`: class proportions are kept, up to rounding.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`.

    **Raises:**

    - `ValueError` for a `size` above `num_rows`, or without rows of every class.

    ```python
    ee.resample.subsets(100, 8, size=0.5, key=key).shape  # (8, 50)
    ```
    """
    num_rows, num_members = check_draw(num_rows, num_members, key)
    count = check_draw_size(size, num_rows, replace=False)
    streams = generators(key, num_members, purpose="subsets")
    if stratify is None:
        return _stack_rows([stream.choice(num_rows, count, replace=False) for stream in streams])

    names, classes = check_row_labels("stratify", stratify, num_rows)
    sizes = np.bincount(classes)
    of_each = np.split(np.argsort(classes, kind="stable"), np.cumsum(sizes)[:-1])
    shares = _shares(names, sizes, count)
    drawn = []
    for stream in streams:
        parts = [stream.choice(rows, share, replace=False) for rows, share in zip(of_each, shares, strict=True)]
        drawn.append(stream.permutation(np.concatenate(parts)))
    return _stack_rows(drawn)


def _shares(names: list, sizes: np.ndarray, count: int) -> np.ndarray:
    """The number of rows of each class: its quota rounded down, plus one for classes with the largest remainders."""
    whole, cut = np.divmod(count * sizes, sizes.sum())
    shares = whole + (np.argsort(np.argsort(-cut, kind="stable")) < count - whole.sum())
    if (shares == 0).any():
        lost = int(np.argmin(shares))
        got = f"got {shares.sum()} of {sizes.sum()} rows, none of the {sizes[lost]} of class {names[lost]!r}"
        raise value_error("a `size` that leaves rows of every class", got, "Pass a larger `size`, or no `stratify`.")
    return shares


def _stack_rows(drawn: list[np.ndarray]) -> Int32[Array, "members size"]:
    return jnp.asarray(np.stack(drawn).astype(np.int32))


def poisson_weights(num_rows: int, num_members: int, *, key: Any) -> Float32[Array, "members rows"]:
    """Poisson(1) row weights: a bootstrap whose row counts are independent.

    Rows of weight 0 are out of bag; for very few rows, all may be 0.

    **Arguments:**

    - `num_rows`, `num_members`, `key`: as for [`eqx_ensemble.resample.bootstrap`][].

    **Returns:**

    Integer-valued float32 weights `(members, rows)`, for [`eqx_ensemble.Each`][].

    ```python
    ee.resample.poisson_weights(100, 8, key=key).shape  # (8, 100)
    ```

    ??? cite
        [Oza and Russell 2001](https://proceedings.mlr.press/r3/oza01a.html)
    """
    num_rows, num_members = check_draw(num_rows, num_members, key)
    streams = generators(key, num_members, purpose="poisson weights")
    return _stack([stream.poisson(size=num_rows) for stream in streams])


def bayesian_weights(num_rows: int, num_members: int, *, key: Any) -> Float32[Array, "members rows"]:
    """Bayesian bootstrap weights: for each member, `num_rows` times a draw from Dirichlet(1, ..., 1).

    Each of the $n$ weights has mean 1 and variance $(n - 1) / (n + 1)$. None is 0: no row is out of bag, and no class
    is lost.

    **Arguments:**

    - `num_rows`, `num_members`, `key`: as for [`eqx_ensemble.resample.bootstrap`][].

    **Returns:**

    float32 weights `(members, rows)`, for [`eqx_ensemble.Each`][].

    ```python
    ee.resample.bayesian_weights(100, 8, key=key).sum(axis=1)  # 100 for every member
    ```

    ??? cite
        [Rubin 1981](https://doi.org/10.1214/aos/1176345338)
    """
    num_rows, num_members = check_draw(num_rows, num_members, key)
    # Exponential variables divided by their sum have this distribution.
    gaps = [
        stream.standard_exponential(num_rows) for stream in generators(key, num_members, purpose="bayesian weights")
    ]
    return _stack([num_rows * (gap / gap.sum()) for gap in gaps])


def counts(rows: Int[ArrayLike, "members n"], num_rows: int) -> Float32[Array, "members rows"]:
    """How often each row occurs in the rows of each member: converts rows to weights.

    **Arguments:**

    - `rows`: row indices `(members, n)`.
    - `num_rows`: the number of rows, `len(x)`.

    **Returns:**

    Integer-valued float32 weights `(members, rows)`, which sum to `n` for each member.

    ```python
    ee.resample.counts(jnp.array([[0, 2, 2]]), 4)  # [[1, 0, 2, 0]]

    # draws whole groups: six rows of three patients
    groups = np.array([0, 0, 0, 1, 2, 2])
    drawn = ee.resample.bootstrap(3, 8, key=key)
    ee.resample.counts(drawn, 3)[:, groups].shape  # (8, 6)
    ```
    """
    num_rows = check_num_rows(num_rows)
    return count_rows(check_rows(rows, num_rows), num_rows)


@partial(jax.jit, static_argnames="num_rows")
def count_rows(rows: Int[Array, "members n"], num_rows: int) -> Float32[Array, "members rows"]:
    """`counts` for checked rows."""
    one = lambda own: jnp.zeros(num_rows, jnp.float32).at[own].add(1)
    return jax.vmap(one)(rows)


def _stack(drawn: list[np.ndarray]) -> Float32[Array, "members rows"]:
    return jnp.asarray(np.stack(drawn).astype(np.float32))
