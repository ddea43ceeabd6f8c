from collections.abc import Callable

import jax
from jaxtyping import Array, ArrayLike

from ._check import check_per_member


def per_member(score: Callable[..., Array], *arrays: ArrayLike, **options: object) -> Array:
    """The score of each member alone, as an ensemble of one.

    **Arguments:**

    - `score`: a score that takes predictions with a leading `members` axis, such as [`eqx_ensemble.scores.nll`][] or
        [`eqx_ensemble.scores.crps_gaussian_mixture`][]; also your own, if JAX can trace it.
    - `arrays`: what the score takes, in its order. All but the last are predictions `(members, ...)`; the last is the
        target, which all members share.
    - `options`: the score's own options, passed on by name. `weights` have no meaning for one member and are refused.

    A score that takes no `members` axis maps over members as it is:
    `jax.vmap(scores.nll_gaussian, in_axes=(0, 0, None))(mean, variance, targets)`.

    **Returns:**

    The scores, `(members,)`, or `(members, *batch)` with `reduction="none"`.

    **Raises:**

    - `ValueError` for fewer than two arrays, predictions with different numbers of members, and `weights`.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    logits = jnp.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 1.0]]])
    scores.per_member(scores.accuracy, logits, jnp.array([0, 1]))  # [1.0, 0.5]
    ```
    """
    predictions = check_per_member("scores.per_member", arrays, options)
    target = arrays[-1]

    def alone(*one):
        return score(*(prediction[None] for prediction in one), target, **options)

    return jax.vmap(alone)(*predictions)
