from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import _keys
from ..._axes import Each
from ..._foreign import from_foreign
from ._check import check_noise, check_row_ids, check_targets


def noisy_targets(targets: Any, ids: Any, *, std: Any, row_ids: Any = None, key: Any) -> Each:
    """Adds Gaussian noise to the targets, drawn once for each member and row.

    A member sees the same noisy target of a row in every epoch and batch, and as often as the row is among its `rows`:
    the noise belongs to the data. It follows from the key, the member's id and the row's id alone, so that more
    members, more rows and their order change none of it. Noise that is drawn anew in every step averages out instead,
    and leaves members as alike as without it.

    **Arguments:**

    - `targets`: `(rows, ...)`, floating-point, shared by all members.
    - `ids`: the members' ids, `ensemble.ids`, or their number.
    - `std`: the standard deviation of the noise: one number, or an array of the shape of `targets`. That of the noise
        which the targets have already makes linear members draws from the posterior:
        [`eqx_ensemble.methods.priors.draw_anchors`][].
    - `row_ids`: an integer id of each row `(rows,)`, for rows that are a part of a larger data set, such as a batch
        of a loader; by default `0, 1, 2, ...`.
    - `key`: the root key.

    **Returns:** the noisy targets of each member, an [`eqx_ensemble.Each`][] `(members, rows, ...)` for the data of
    [`eqx_ensemble.fit`][], in the dtype of `targets`.

    **Raises:** `TypeError` for targets that are not floating-point numbers, or for ids and keys of the wrong kind;
    `ValueError` for a standard deviation that is negative or of another shape.

    ```python
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    targets = ee.methods.priors.noisy_targets(y, 4, std=0.1, key=key)
    targets.value.shape  # (4, 100, 1)
    # for `fit(ensemble, loss, optimiser, (x, targets), ...)`
    ```

    ??? cite

        Osband, Aslanides and Cassirer, *Randomized Prior Functions for Deep Reinforcement Learning*, NeurIPS 2018,
        arXiv:1806.03335 (section 3).
    """
    targets = from_foreign(targets, "targets", name="methods.priors.noisy_targets")
    check_targets(targets)
    row_ids = np.arange(len(targets)) if row_ids is None else row_ids
    check_row_ids(row_ids, len(targets))
    std = check_noise(std, targets.shape)
    keys = _keys.member_keys(key, ids, purpose="noise in targets")
    targets = jnp.asarray(targets)
    return Each(_add_noise(targets, jnp.asarray(std, targets.dtype), jnp.asarray(row_ids, jnp.int32), keys))


@jax.jit
def _add_noise(targets: Array, std: Array, row_ids: Array, keys: Array) -> Array:
    draw = lambda key, row: jax.random.normal(jax.random.fold_in(key, row), targets.shape[1:], targets.dtype)
    of_member = lambda key: targets + std * jax.vmap(draw, in_axes=(None, 0))(key, row_ids)
    return jax.vmap(of_member)(keys)
