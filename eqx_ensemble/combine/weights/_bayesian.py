import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from ._check import check_log_scores


def bayesian(
    log_scores: Float[ArrayLike, " members *batch"], *, mask: Bool[ArrayLike, "*batch"] | None = None
) -> Float[Array, " members"]:
    r"""The posterior probabilities of the members, with equal prior probabilities: weights of Bayesian model averaging.

    $w_m \propto \exp \sum_i \ell_{mi}$ with $\ell_{mi}$ the log-likelihood of row $i$ under member $m$. Differences
    between members are summed, so that a large common part of the log-likelihoods costs no precision. With many rows
    nearly all weight is on the single best member, since one of the members is assumed to be true; for weights that
    predict well when none of them is, see [`eqx_ensemble.combine.weights.stacking`][].

    **Arguments:**

    - `log_scores`: the members' log evidences `(members,)`, or their log-likelihoods of each row `(members, *batch)`.
        Likelihoods of the rows that members were trained on favour those that overfit: they are evidence only for
        members whose parameters were fixed before. A prior is added to evidences: `log_evidences + jnp.log(prior)`.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    Convex weights `(members,)`.

    **Raises:**

    As [`eqx_ensemble.combine.weights.stacking`][].

    ```python
    ee.combine.weights.bayesian(jnp.log(jnp.array([2.0, 1.0, 1.0])))  # [0.5, 0.25, 0.25]
    ```

    ??? cite
        [Bayesian Model Averaging: A Tutorial](https://doi.org/10.1214/ss/1009212519)

        ```bibtex
        @article{hoeting1999bayesian,
            author={Jennifer A. Hoeting and David Madigan and Adrian E. Raftery and Chris T. Volinsky},
            title={Bayesian Model Averaging: A Tutorial},
            journal={Statistical Science},
            year={1999},
        }
        ```
    """
    return _bayesian(*check_log_scores("combine.weights.bayesian", log_scores, mask))


@jax.jit
def _bayesian(logs: Float[Array, " members *batch"], mask: Bool[Array, "*batch"] | None) -> Float[Array, " members"]:
    logs = logs if mask is None else jnp.where(mask[None], logs, 0)
    total = lambda values: jnp.sum(values, axis=tuple(range(1, logs.ndim)))
    best = jnp.argmax(total(logs - jnp.max(logs, axis=0)[None]))
    # Relative to the best member, not to the best of each row, sums over many rows stay small and accurate.
    return jax.nn.softmax(total(logs - jax.lax.stop_gradient(logs[best])[None]))
