from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from .._streams import generators
from ._check import check_draw, check_draw_size, check_row_labels, check_shares


def bootstrap(
    num_rows: int, num_members: int, *, size: int | float | None = None, stratify: Any = None, key: Any
) -> Int32[Array, "members size"]:
    r"""Bootstrap: rows drawn with replacement, independently for each member.

    Each draw is uniform over the `num_rows` rows. A fraction of about $(1 - 1/n)^n \approx 0.37$ of the rows is not
    drawn by a member: its out-of-bag rows, see [`eqx_ensemble.resample.out_of_bag`][]. A member's rows depend only on
    the key and its index: increasing `num_members` does not change earlier members. To draw whole groups of rows see
    [`eqx_ensemble.resample.counts`][].

    **Arguments:**

    - `num_rows`: the number of rows of the data, `len(x)`.
    - `num_members`: the number of members.
    - `size`: the number of rows per member, a count (which may exceed `num_rows`) or a fraction of `num_rows`, rounded;
        `num_rows` if not given.
    - `stratify`: discrete labels `(rows,)`: rows are drawn within each class. Without `size`, class counts are kept,
        and entry `i` is a row of the class of row `i`; with `size`, class proportions are kept, up to rounding.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`.

    **Raises:**

    - `TypeError` for counts that are not integers, an invalid key, and labels that are not discrete.
    - `ValueError` for counts below one, fractions outside (0, 1], labels of the wrong length, and a `size` without rows
        of every class.

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
    """Subsets: rows drawn without replacement, independently for each member.

    Every subset of `size` rows is equally likely; its order is random. A member's rows depend only on the key and its
    index: increasing `num_members` does not change earlier members.

    **Arguments:**

    - `num_rows`: the number of rows of the data, `len(x)`.
    - `num_members`: the number of members.
    - `size`: the number of rows per member, a count or a fraction of `num_rows`, rounded.
    - `stratify`: discrete labels `(rows,)`: class proportions are kept, up to rounding.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    int32 row indices `(members, size)`, for `fit(..., rows=...)`; distinct for each member.

    **Raises:**

    - `TypeError` for counts that are not integers, an invalid key, and labels that are not discrete.
    - `ValueError` for counts below one, sizes above `num_rows`, fractions outside (0, 1], labels of the wrong length,
        and a `size` without rows of every class.

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
    """The number of rows of each class: its quota rounded down, plus one for classes with the largest remainders."""
    whole, cut = np.divmod(count * sizes, sizes.sum())
    shares = whole + (np.argsort(np.argsort(-cut, kind="stable")) < count - whole.sum())
    check_shares(name, names, sizes, shares)
    return shares


def _stack(drawn: list[np.ndarray]) -> Int32[Array, "members size"]:
    return jnp.asarray(np.stack(drawn).astype(np.int32))
