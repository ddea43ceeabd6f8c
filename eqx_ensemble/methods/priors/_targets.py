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
    """Adds Gaussian noise to the targets, drawn once per member and row.

    The noise is part of the data: a member gets the same noisy target for a row in every epoch and batch, and for every
    repetition of the row in its `rows`. It depends only on the key, the member's id and the row's id, not on the number
    or order of members and rows. Noise that is redrawn in every step would average out, and would not make members
    differ.

    **Arguments:**

    - `targets`: `(rows, ...)`, floating-point, shared by all members.
    - `ids`: the ids of the members, `ensemble.ids`, or the number of members.
    - `std`: the standard deviation of the noise: one number, or an array of the shape of `targets`. Equal to that of
        the noise already in the targets, it makes linear members draws from the posterior:
        [`eqx_ensemble.methods.priors.draw_anchors`][].
    - `row_ids`: one integer id per row `(rows,)`, for rows of a larger data set, such as a batch of a loader; by
        default `0, 1, 2, ...`.
    - `key`: the root key.

    **Returns:** the noisy targets of each member, an [`eqx_ensemble.Each`][] `(members, rows, ...)` for the data of
    [`eqx_ensemble.fit`][], in the dtype of `targets`.

    **Raises:** `TypeError` for targets that are not floating-point, and for ids and keys of the wrong type;
    `ValueError` for targets without rows, row ids out of range, and a standard deviation that is negative or of another
    shape.

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
