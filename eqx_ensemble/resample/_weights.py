from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float32, Int

from .._streams import generators
from ._check import check_draw, check_num_rows, check_rows


def poisson_weights(num_rows: int, num_members: int, *, key: Any) -> Float32[Array, "members rows"]:
    """Poisson(1) row weights for each member: a bootstrap with independent row counts.

    Mean and variance are 1, as for the counts of a bootstrap of many rows. The sum of a member's weights varies around
    `num_rows`, and may be 0 for very few rows. Rows of weight 0 are out of bag. A member's weights depend only on the
    key and its index.

    **Arguments:**

    - `num_rows`: the number of rows of the data, `len(x)`.
    - `num_members`: the number of members.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    Integer-valued float32 weights `(members, rows)`: pass them to `fit` as an [`eqx_ensemble.Each`][] in addition to
    the data.

    **Raises:**

    - `TypeError` for counts that are not integers, and an invalid key.
    - `ValueError` for counts below one.

    ```python
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)


    def loss(model, batch, key):
        x, y, weight = batch
        return jnp.mean(weight * jnp.mean((jax.vmap(model)(x) - y) ** 2, axis=1))


    weights = ee.resample.poisson_weights(len(x), 8, key=key)
    run = ee.fit(
        ensemble, loss, optax.adam(1e-2), (x, y, ee.Each(weights)), epochs=2, key=key
    )
    ```

    ??? cite
        [Online Bagging and Boosting](https://proceedings.mlr.press/r3/oza01a.html)

        ```bibtex
        @inproceedings{oza2001online,
            author={Nikunj C. Oza and Stuart Russell},
            title={Online Bagging and Boosting},
            booktitle={Artificial Intelligence and Statistics},
            year={2001},
        }
        ```
    """
    num_rows, num_members = check_draw("resample.poisson_weights", num_rows, num_members, key)
    streams = generators(key, num_members, purpose="poisson weights")
    return _stack([stream.poisson(size=num_rows) for stream in streams])


def bayesian_weights(num_rows: int, num_members: int, *, key: Any) -> Float32[Array, "members rows"]:
    r"""Bayesian bootstrap weights: for each member, `num_rows` times a draw from Dirichlet(1, ..., 1).

    A member's weights sum to $n$, `num_rows`; each has mean 1 and variance $(n - 1) / (n + 1)$. No weight is 0: no row
    is out of bag, and no class is lost. A member's weights depend only on the key and its index.

    **Arguments:**

    - `num_rows`: the number of rows of the data, `len(x)`.
    - `num_members`: the number of members.
    - `key`: one threefry key, typed or legacy. Draws are made on the host, outside `jax.jit`.

    **Returns:**

    float32 weights `(members, rows)`: pass them to `fit` as an [`eqx_ensemble.Each`][] in addition to the data, see
    [`eqx_ensemble.resample.poisson_weights`][].

    **Raises:**

    - `TypeError` for invalid counts or keys.
    - `ValueError` for counts below one.

    ```python
    weights = ee.resample.bayesian_weights(100, 8, key=key)
    weights.shape, weights.sum(axis=1)  # (8, 100), 100 for every member
    ```

    ??? cite
        [The Bayesian Bootstrap](https://doi.org/10.1214/aos/1176345338)

        ```bibtex
        @article{rubin1981bayesian,
            author={Donald B. Rubin},
            title={The Bayesian Bootstrap},
            journal={The Annals of Statistics},
            year={1981},
        }
        ```
    """
    num_rows, num_members = check_draw("resample.bayesian_weights", num_rows, num_members, key)
    # Exponential variables divided by their sum have this distribution.
    gaps = [
        stream.standard_exponential(num_rows) for stream in generators(key, num_members, purpose="bayesian weights")
    ]
    return _stack([num_rows * (gap / gap.sum()) for gap in gaps])


def counts(rows: Int[ArrayLike, "members n"], num_rows: int) -> Float32[Array, "members rows"]:
    """The number of times that each row occurs in the rows of each member: converts rows to weights.

    For a bootstrap of whole groups, whose numbers of rows vary, expand the counts of groups to rows:
    `counts(bootstrap(num_groups, ...), num_groups)[:, groups]`.

    **Arguments:**

    - `rows`: row indices `(members, n)`.
    - `num_rows`: the number of rows of the data, `len(x)`.

    **Returns:**

    Integer-valued float32 weights `(members, rows)`, which sum to `n` for each member.

    **Raises:**

    - `TypeError` for rows that are not integers.
    - `ValueError` for rows that are not `(members, n)`.
    - `IndexError` for rows outside the data (where concrete).

    ```python
    ee.resample.counts(jnp.array([[0, 2, 2]]), 4)  # [[1, 0, 2, 0]]

    groups = np.array([0, 0, 0, 1, 2, 2])  # six rows of three patients
    drawn = ee.resample.bootstrap(3, 8, key=key)
    ee.resample.counts(drawn, 3)[:, groups]
    # (8, 6): rows of one patient have equal weights
    ```
    """
    name = "resample.counts"
    num_rows = check_num_rows(name, num_rows)
    return count_rows(check_rows(name, rows, num_rows), num_rows)


@partial(jax.jit, static_argnames="num_rows")
def count_rows(rows: Int[Array, "members n"], num_rows: int) -> Float32[Array, "members rows"]:
    """`counts` for checked rows."""
    one = lambda own: jnp.zeros(num_rows, jnp.float32).at[own].add(1)
    return jax.vmap(one)(rows)


def _stack(drawn: list[np.ndarray]) -> Float32[Array, "members rows"]:
    return jnp.asarray(np.stack(drawn).astype(np.float32))
