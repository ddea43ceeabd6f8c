from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32, Real

from ._check import check_prune


class Pruned(NamedTuple):
    """The members that are left, in their order, and their weights, which sum to one."""

    members: Int32[Array, " left"]
    weights: Float[Array, " left"]


def prune(weights: Real[ArrayLike, " members"], *, above: float | int = 0.0, num_members: int | None = None) -> Pruned:
    """The members with enough weight, and weights for them alone.

    An ensemble itself is pruned by [`eqx_ensemble.prune`][].

    **Arguments:**

    - `weights`: convex weights over members, `(members,)`; divided by their sum. Concrete: how many members are left
        depends on them.
    - `above`: members are left whose weight, of a sum of one, is above this. Those of weight zero always go.
    - `num_members`: at most so many, those of the largest weights, the first of equal ones.

    **Returns:**

    A named tuple with `.members`, positions `(left,)` in rising order, and `.weights` `(left,)`.

    **Raises:**

    - `TypeError` for traced weights.
    - `ValueError` for unfit weights, and for an `above` that leaves no member.

    ```python
    ee.combine.weights.prune(jnp.array([0.5, 0.01, 0.0, 0.49]), above=0.05)  # members [0, 3]
    ```
    """
    exact = check_prune("combine.weights.prune", weights, above, num_members)
    order = np.argsort(-exact, kind="stable")
    left = np.sort(order[: int((exact > above).sum())][:num_members])
    dtype = jnp.float64 if jnp.asarray(weights).dtype == jnp.float64 else jnp.float32
    return Pruned(jnp.asarray(left, jnp.int32), jnp.asarray(exact[left] / exact[left].sum(), dtype))
