from typing import Any

from jaxtyping import Array, Float

from . import _check, combine
from ._ensemble import Ensemble, M
from ._ensemble._check import check_ensemble


def prune(
    ensemble: Ensemble[M], weights: Any, *, above: float | int = 0.0, num_members: int | None = None
) -> tuple[Ensemble[M], Float[Array, " left"]]:
    """The members with enough weight as a smaller ensemble, and weights for them.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 4, key=key)
    small, weights = ee.prune(ensemble, jnp.array([0.7, 0.0, 0.29, 0.01]), above=0.05)
    small.ids, weights  # [0, 2], [0.707, 0.293]
    ee.combine.mean(small(jnp.ones(2)), weights=weights)
    ```

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: convex weights over members, `(members,)`, from [`eqx_ensemble.combine.weights.stacking`][] and the
        like; divided by their sum.
    - `above`: members are left whose weight, of a sum of one, is above this. Those of weight zero always go.
    - `num_members`: at most so many, those of the largest weights, the first of equal ones.

    **Returns:** the ensemble of these members, in their order and with their ids, and their weights, which sum to one.

    **Raises:** `TypeError` for traced weights; `ValueError` for unfit weights, and an `above` that leaves no member.
    """
    check_ensemble(ensemble, name="prune")
    _check.check_weight_count(weights, ensemble.num_members, name="prune")
    left, kept = combine.weights.prune(weights, above=above, num_members=num_members)
    return ensemble[left], kept
