import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_logits, check_weights
from .._weighting import blank_unweighted, weighted_mean
from ._entropy import mean_divergence


def jensen_shannon(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "*batch"]:
    r"""The Jensen-Shannon divergence of the members, in nats: their mean divergence from their mixture.

    $\sum_m w_m \mathrm{KL}(p_m \parallel p)$ with $p = \sum_m w_m p_m$, from 0 to the entropy of the weights. It is the
    mutual information between label and member, the `epistemic` part of
    [`eqx_ensemble.uncertainty.decompose_entropy`][]. For two equally weighted members it is half of Lin's $L$, the sum
    of their divergences from the mixture.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    Divergences `(*batch,)`, never negative.

    **Raises:**

    - `TypeError` for logits that are not floating-point.
    - `ValueError` for logits without a `members` axis or with fewer than two classes, and for invalid weights.

    ```python
    logits = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))  # two members, one row
    ee.uncertainty.jensen_shannon(logits)  # log(2)
    ```

    ??? cite
        [Divergence Measures Based on the Shannon Entropy](https://doi.org/10.1109/18.61115)

        ```bibtex
        @article{lin1991divergence,
            author={Jianhua Lin},
            title={Divergence Measures Based on the {S}hannon Entropy},
            journal={IEEE Transactions on Information Theory},
            year={1991},
        }
        ```
    """
    name = "uncertainty.jensen_shannon"
    checked = check_logits(name, logits)
    return _jensen_shannon(checked, check_weights(name, weights, checked.shape[0], checked.dtype))


def pairwise_kl(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "*batch"]:
    r"""The mean KL divergence, in nats, between two members drawn with probabilities equal to their weights.

    $\sum_{mn} w_m w_n \mathrm{KL}(p_m \parallel p_n) = \sum_c \mathrm{Cov}_m(p_{mc}, \log p_{mc})$, an upper bound on
    [`eqx_ensemble.uncertainty.jensen_shannon`][], computed in time linear in the members. Its sum with the mean entropy
    of the members is their mean cross-entropy: the total uncertainty if a random member predicts instead of the
    mixture. Pairs of a member with itself are included and contribute zero: for equal weights, the mean over pairs of
    different members is `num_members / (num_members - 1)` times this.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    Divergences `(*batch,)`, never negative; infinite where one member assigns a class probability zero and another does
    not.

    **Raises:**

    As [`eqx_ensemble.uncertainty.jensen_shannon`][].

    ```python
    logits = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))  # two members, one row
    ee.uncertainty.pairwise_kl(logits)  # 0.4 * log(9) = 0.879
    ```

    ??? cite
        [Introducing an Improved Information-Theoretic Measure of Predictive
        Uncertainty](https://arxiv.org/abs/2311.08309)

        ```bibtex
        @article{schweighofer2023introducing,
            author={Kajetan Schweighofer and Lukas Aichberger and Mykyta Ielanskyi and Sepp Hochreiter},
            title={Introducing an Improved Information-Theoretic Measure of Predictive Uncertainty},
            journal={arXiv: 2311.08309},
            year={2023},
        }
        ```
    """
    name = "uncertainty.pairwise_kl"
    checked = check_logits(name, logits)
    return _pairwise_kl(checked, check_weights(name, weights, checked.shape[0], checked.dtype))


@jax.jit
def _jensen_shannon(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    return mean_divergence(jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1), weights)


@jax.jit
def _pairwise_kl(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    absent = logs == -jnp.inf
    finite = jnp.where(absent, 0, logs)
    product = _centre(jnp.where(absent, 0, jnp.exp(finite)), weights) * _centre(finite, weights)
    # Members of weight zero are overwritten, and therefore never absent.
    nowhere = weighted_mean(jnp.where(absent, 0, jnp.ones_like(logs)), weights) == 0
    disputed = jnp.any(absent, axis=0) & ~nowhere
    return jnp.sum(jnp.where(disputed, jnp.inf, jnp.maximum(weighted_mean(product, weights), 0)), axis=-1)


def _centre(
    values: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "members *batch classes"]:
    deviation = values - weighted_mean(values, weights)[None]
    return deviation - weighted_mean(deviation, weights)[None]
