from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from .._streams import generators
from ._check import check_draw, check_draw_size, check_row_labels, check_shares


def bootstrap(
    num_rows: int, num_members: int, *, size: int | float | None = None, stratify: Any = None, key: Any
) -> Int32[Array, "members size"]:
    r"""Rows drawn with replacement, for every member its own.

    Each of a member's rows is any of the `num_rows` rows with equal probability, so that it never sees a share of
    about $(1 - 1/n)^n \approx 0.37$ of them: these are its out-of-bag rows, see
    [`eqx_ensemble.resample.out_of_bag`][]. A member's rows follow from the key and its number alone: growing
    `num_members` changes no old member's. Whole groups of rows are drawn by drawing the groups, see
    [`eqx_ensemble.resample.counts`][].

    **Arguments:**

    - `num_rows`: how many rows the data have, `len(x)`.
    - `num_members`: how many members draw.
    - `size`: how many rows a member draws, a count (also a larger one) or a fraction of `num_rows`, to the nearest
        row; all of them if not given.
    - `stratify`: discrete labels `(rows,)`: draws within each class, so that classes keep their counts; of a smaller
        `size` they keep their shares, to the nearest row. Without `size`, entry `i` is a row of the class of row `i`.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`.

    **Raises:**

    - `TypeError` for what is not a count, a fraction, a threefry key or discrete labels.
    - `ValueError` for sizes below one row, labels of the wrong length, and a `size` that leaves out a class.

    ```python
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
    rows = ee.resample.bootstrap(len(x), 8, key=key)
    run = ee.fit(ensemble, loss, optax.adam(1e-2), (x, y), epochs=2, rows=rows, key=key)
    ```

    ??? cite
        [Bagging Predictors](https://doi.org/10.1007/BF00058655)

        ```bibtex
        @article{breiman1996bagging,
            author={Leo Breiman},
            title={Bagging Predictors},
            journal={Machine Learning},
            year={1996},
        }
        ```
    """
    name = "resample.bootstrap"
    num_rows, num_members = check_draw(name, num_rows, num_members, key)
    count = num_rows if size is None else check_draw_size(name, size, num_rows, replace=True)
    streams = generators(key, num_members, purpose="bootstrap")
    if stratify is None:
        return _stack([stream.integers(num_rows, size=count) for stream in streams])

    names, classes = check_row_labels(name, "stratify", stratify, num_rows)
    by_class, sizes = np.argsort(classes, kind="stable"), np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    wanted = np.repeat(np.arange(len(sizes)), _shares(name, names, sizes, count))
    drawn = []
    for stream in streams:
        own = classes if size is None else stream.permutation(wanted)
        drawn.append(by_class[starts[own] + stream.integers(sizes[own])])
    return _stack(drawn)


def subsets(
    num_rows: int, num_members: int, *, size: int | float, stratify: Any = None, key: Any
) -> Int32[Array, "members size"]:
    """Rows drawn without replacement, for every member its own.

    A member's rows are any `size` of the `num_rows` rows with equal probability, in random order. They follow from
    the key and the member's number alone: growing `num_members` changes no old member's.

    **Arguments:**

    - `num_rows`: how many rows the data have, `len(x)`.
    - `num_members`: how many members draw.
    - `size`: how many rows a member draws, a count or a fraction of `num_rows`, to the nearest row.
    - `stratify`: discrete labels `(rows,)`: classes keep their shares, to the nearest row.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`; those of one member differ.

    **Raises:**

    - `TypeError` for what is not a count, a fraction, a threefry key or discrete labels.
    - `ValueError` for sizes below one row or above `num_rows`, labels of the wrong length, and a `size` that leaves
        out a class.

    ```python
    rows = ee.resample.subsets(100, 8, size=0.5, key=key)
    rows.shape  # (8, 50)
    ```
    """
    name = "resample.subsets"
    num_rows, num_members = check_draw(name, num_rows, num_members, key)
    count = check_draw_size(name, size, num_rows, replace=False)
    streams = generators(key, num_members, purpose="subsets")
    if stratify is None:
        return _stack([stream.choice(num_rows, count, replace=False) for stream in streams])

    names, classes = check_row_labels(name, "stratify", stratify, num_rows)
    sizes = np.bincount(classes)
    of_each = np.split(np.argsort(classes, kind="stable"), np.cumsum(sizes)[:-1])
    shares = _shares(name, names, sizes, count)
    drawn = []
    for stream in streams:
        parts = [stream.choice(rows, share, replace=False) for rows, share in zip(of_each, shares, strict=True)]
        drawn.append(stream.permutation(np.concatenate(parts)))
    return _stack(drawn)


def _shares(name: str, names: list, sizes: np.ndarray, count: int) -> np.ndarray:
    """How many rows of each class: its quota rounded down, and one more where most was cut off, first classes first."""
    whole, cut = np.divmod(count * sizes, sizes.sum())
    shares = whole + (np.argsort(np.argsort(-cut, kind="stable")) < count - whole.sum())
    check_shares(name, names, sizes, shares)
    return shares


def _stack(drawn: list[np.ndarray]) -> Int32[Array, "members size"]:
    return jnp.asarray(np.stack(drawn).astype(np.int32))
