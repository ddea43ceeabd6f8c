import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_logits, check_weights
from .._weighting import blank_unweighted, class_mixture, weighted_mean
from ._variance import check_temperature


def least_confidence(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "*batch"]:
    r"""One minus the largest probability of the mixture of the members, $1 - \max_c \sum_m w_m p_{mc}$.

    Nearly certain rows remain distinguishable.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    `(*batch,)`, from 0 to 1 - 1 / `classes`; higher is less certain.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.7, 0.3]]]))
    ee.uncertainty.least_confidence(logits)  # 0.2
    ```

    ??? cite
        [Hendrycks and Gimpel 2017](https://arxiv.org/abs/1610.02136)
    """
    checked = check_logits(logits)
    return _least_confidence(checked, check_weights(weights, checked.shape[0], checked.dtype))


def free_energy(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    temperature: Real[ArrayLike, ""] = 1.0,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "*batch"]:
    r"""The mean over members of the free energy of their logits, $-T \log \sum_c \exp(f_c / T)$.

    **Arguments:**

    - `logits`: raw logits `(members, *batch, classes)`; log-probabilities have energy zero at $T = 1$.
    - `temperature`: $T$, positive.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Energies `(*batch,)`, in the unit of the logits; higher is less similar to the training data.

    ```python
    ee.uncertainty.free_energy(jnp.array([[[0.0, 0.0], [9.0, 0.0]]]))  # [-0.69, -9.0]
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2010.03759)
    """
    checked = check_logits(logits)
    convex = check_weights(weights, checked.shape[0], checked.dtype)
    return _free_energy(checked, check_temperature(temperature, checked.dtype), convex)


@jax.jit
def _least_confidence(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    logs = class_mixture(logits, weights)
    best = jax.nn.one_hot(jnp.argmax(logs, axis=-1), logs.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(best & ~jnp.isnan(logs), 0, jnp.exp(logs)), axis=-1)


@jax.jit
def _free_energy(
    logits: Float[Array, "members *batch classes"],
    temperature: Float[Array, ""],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    scaled = blank_unweighted(logits, weights) / temperature
    return -temperature * weighted_mean(jax.nn.logsumexp(scaled, axis=-1), weights)
