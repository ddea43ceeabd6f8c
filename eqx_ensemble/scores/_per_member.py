from collections.abc import Callable

import jax
from jaxtyping import Array, ArrayLike

from ._check import check_per_member


def per_member(score: Callable[..., Array], *arrays: ArrayLike, **options: object) -> Array:
    """The score of each member, as an ensemble of one.

    **Arguments:**

    - `score`: a score that takes predictions with a leading `members` axis, such as [`eqx_ensemble.scores.nll`][] or
        [`eqx_ensemble.scores.crps_gaussian_mixture`][]; or a function of your own that JAX can trace.
    - `arrays`: the arguments of the score, in order. All but the last are predictions `(members, ...)`; the last is the
        target, shared by all members.
    - `options`: keyword arguments of the score, such as `mask` and `row_weights`. `weights` raise an error, because
        they have no effect on one member.

    Map a score without a `members` axis directly:
    `jax.vmap(scores.nll_gaussian, in_axes=(0, 0, None))(mean, variance, targets)`.

    **Returns:**

    The scores, `(members,)`, or `(members, *batch)` with `reduction="none"`.

    **Raises:**

    - `ValueError` for fewer than two arrays, predictions with different numbers of members, and `weights`.

    ```python
    logits = jnp.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 1.0]]])
    ee.scores.per_member(ee.scores.accuracy, logits, jnp.array([0, 1]))  # [1.0, 0.5]
    ```
    """
    predictions = check_per_member("scores.per_member", arrays, options)
    target = arrays[-1]

    def alone(*one):
        return score(*(prediction[None] for prediction in one), target, **options)

    return jax.vmap(alone)(*predictions)
