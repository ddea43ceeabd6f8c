import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from ._check import check_log_scores


def bayesian(
    log_scores: Float[ArrayLike, " members *batch"], *, mask: Bool[ArrayLike, "*batch"] | None = None
) -> Float[Array, " members"]:
    r"""Weights of Bayesian model averaging: the posterior probabilities of the members under a uniform prior.

    $w_m \propto \exp \sum_i \ell_{mi}$ with the log-likelihood $\ell_{mi}$ of row $i$ under member $m$. Differences
    between members are summed, so a large common part of the log-likelihoods costs no precision. One member is assumed
    to be the true model: with many rows, nearly all weight goes to the single best member. If no member is the true
    model, [`eqx_ensemble.combine.weights.stacking`][] predicts better.

    **Arguments:**

    - `log_scores`: the members' log evidences `(members,)`, or log-likelihoods of rows `(members, *batch)`. Likelihoods
        of training rows favour members that overfit: use rows that no member was trained on. For another prior pass
        `log_evidences + jnp.log(prior)`.
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
