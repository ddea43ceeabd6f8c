from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32, Real

from ..._foreign import from_foreign
from ._check import check_sparsify


class Sparse(NamedTuple):
    """The members with enough weight.

    **Attributes:**

    - `members`: their indices, in increasing order.
    - `weights`: their weights, which sum to one.
    """

    members: Int32[Array, " left"]
    weights: Float[Array, " left"]


def sparsify(
    weights: Real[ArrayLike, " members"], *, above: float | int = 0.0, num_members: int | None = None
) -> Sparse:
    """Keeps the members with enough weight, and normalises their weights.

    To prune an ensemble use [`eqx_ensemble.prune`][].

    **Arguments:**

    - `weights`: convex weights over members, `(members,)`; divided by their sum. They must be concrete, because the
        number of kept members depends on them.
    - `above`: keeps members whose normalised weight exceeds this. Members of weight zero are always removed.
    - `num_members`: keeps at most this many members, those with the largest weights, the first among equal weights.

    **Returns:**

    A named tuple with `.members`, indices `(left,)` in increasing order, and `.weights` `(left,)`.

    **Raises:**

    - `TypeError` for traced weights.
    - `ValueError` for invalid weights, and for an `above` that keeps no member.

    ```python
    ee.combine.weights.sparsify(jnp.array([0.5, 0.01, 0.0, 0.49]), above=0.05)
    # members [0, 3]
    ```
    """
    exact = check_sparsify("combine.weights.sparsify", weights, above, num_members)
    order = np.argsort(-exact, kind="stable")
    left = np.sort(order[: int((exact > above).sum())][:num_members])
    dtype = jnp.float64 if jnp.asarray(from_foreign(weights)).dtype == jnp.float64 else jnp.float32
    return Sparse(jnp.asarray(left, jnp.int32), jnp.asarray(exact[left] / exact[left].sum(), dtype))
