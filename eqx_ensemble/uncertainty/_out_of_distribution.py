import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Logits, Temperature, Weights, array_function
from .._weighting import class_mixture, weighted_mean


@array_function(each_row=True)
def least_confidence(logits: Logits, *, weights: Weights = None) -> Float[Array, "*batch"]:
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
    logs = class_mixture(logits, weights)
    best = jax.nn.one_hot(jnp.argmax(logs, axis=-1), logs.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(best & ~jnp.isnan(logs), 0, jnp.exp(logs)), axis=-1)


@array_function(each_row=True)
def free_energy(logits: Logits, *, temperature: Temperature = 1.0, weights: Weights = None) -> Float[Array, "*batch"]:
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
    return -temperature * weighted_mean(jax.nn.logsumexp(logits / temperature, axis=-1), weights)
