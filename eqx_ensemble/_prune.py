from typing import Any

from jaxtyping import Array, Float

from . import _check, combine
from ._ensemble import Ensemble, M, check_ensemble


def prune_members(
    ensemble: Ensemble[M], weights: Any, *, above: float | int = 0.0, num_members: int | None = None
) -> tuple[Ensemble[M], Float[Array, " left"]]:
    """Keeps the members with enough weight, as a smaller ensemble with normalised weights.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: convex weights `(members,)`, such as those of [`eqx_ensemble.combine.weights.stacking`][]; divided by
        their sum.
    - `above`: keeps members whose normalised weight exceeds this; those of weight zero never.
    - `num_members`: keeps at most this many members, those with the largest weights.

    **Returns:** the ensemble of these members, with their ids, and their weights, which sum to one.

    **Raises:** `TypeError` for traced weights; `ValueError` for invalid weights, and if no member is left.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 4, key=key)
    small, weights = ee.prune_members(ensemble, jnp.array([0.7, 0.0, 0.29, 0.01]), above=0.05)
    small.ids, weights  # [0, 2], [0.707, 0.293]
    ee.combine.mean(small(jnp.ones(2)), weights=weights)
    ```
    """
    check_ensemble(ensemble)
    _check.check_weight_count(weights, ensemble.num_members)
    left, kept = combine.weights.sparsify(weights, above=above, num_members=num_members)
    return ensemble[left], kept
