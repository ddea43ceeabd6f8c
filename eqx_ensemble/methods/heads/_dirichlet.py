import jax
import jax.numpy as jnp
from jax.scipy.special import digamma
from jaxtyping import Array, ArrayLike, Float

from ..._check import check_floating, check_logits, needs_message, promote
from ...uncertainty import Decomposition
from ._check import check_above


def dirichlet(logits: Float[ArrayLike, "*batch classes"]) -> Float[Array, "*batch classes"]:
    r"""The head of evidential classification: maps the outputs of a last layer to a Dirichlet distribution.

    $\alpha_k = e_k + 1$, where the evidence $e_k$ of class $k$ is the softplus of its output. Without evidence, the
    distribution over probabilities is uniform. The authors' ReLU has no gradient in rows whose outputs are all
    negative; for the exponential, pass `jnp.exp(logits) + 1` to the loss.

    **Arguments:**

    - `logits`: `(*batch, classes)`, the outputs for many rows, or for one row, `(classes,)`, inside a model.

    **Returns:**

    The concentration, `(*batch, classes)`. The softmax of its logarithm is the mean of the distribution, so functions
    of logits take the logarithm: `ee.scores.nll(jnp.log(concentration), labels)`.

    **Raises:**

    - `TypeError` for outputs that are not floating-point.
    - `ValueError` for fewer than two classes.

    ```python
    ee.methods.heads.dirichlet(jnp.array([0.0, 5.0]))  # [1.693, 6.007]
    ```

    ??? cite
        [Evidential Deep Learning to Quantify Classification Uncertainty](https://arxiv.org/abs/1806.01768)
    """
    return jax.nn.softplus(check_logits("methods.heads.dirichlet", logits, members=False)) + 1


def vacuity(concentration: Float[ArrayLike, "*batch classes"]) -> Float[Array, "*batch"]:
    r"""The uncertainty of evidential classification: the number of classes over the total concentration, $K / S$.

    For a concentration of at least 1 it is between 0 and 1, and 1 without evidence. It does not depend on how evidence
    is distributed over classes; for conflicting evidence see [`eqx_ensemble.methods.heads.decompose_dirichlet`][].

    **Arguments:**

    - `concentration`: `(*batch, classes)`, from [`eqx_ensemble.methods.heads.dirichlet`][], with or without a `members`
        axis.

    **Returns:**

    `(*batch,)`.

    **Raises:**

    As [`eqx_ensemble.methods.heads.decompose_dirichlet`][].

    ```python
    ee.methods.heads.vacuity(jnp.array([1.0, 7.0]))  # 0.25
    ```

    ??? cite
        [Evidential Deep Learning to Quantify Classification Uncertainty](https://arxiv.org/abs/1806.01768)
    """
    name = "methods.heads.vacuity"
    checked = check_concentration(name, concentration)
    check_positive(name, concentration)
    return checked.shape[-1] / jnp.sum(checked, axis=-1)


def decompose_dirichlet(concentration: Float[ArrayLike, "*batch classes"]) -> Decomposition:
    r"""Decomposes the entropy of the predicted class, in nats, under a Dirichlet distribution of its probabilities.

    `total` is the entropy of the mean probabilities; `aleatoric` the mean entropy,
    $\sum_k \frac{\alpha_k}{S} (\psi(S + 1) - \psi(\alpha_k + 1))$; `epistemic` the difference, the mutual information
    between class and probabilities. For disagreement between members see
    [`eqx_ensemble.uncertainty.decompose_entropy`][].

    The amount of evidence is determined by the loss and its penalty, not by the number of training rows: `epistemic`
    ranks rows, but its magnitude has little meaning.

    **Arguments:**

    - `concentration`: `(*batch, classes)`, from [`eqx_ensemble.methods.heads.dirichlet`][], with or without a `members`
        axis.

    **Returns:**

    [`eqx_ensemble.uncertainty.Decomposition`][], each part `(*batch,)`.

    **Raises:**

    - `TypeError` for a concentration that is not floating-point.
    - `ValueError` for fewer than two classes, and for a concentration that is not above zero (where concrete).

    ```python
    # 0.693 = 0.5 + 0.193
    ee.methods.heads.decompose_dirichlet(jnp.array([1.0, 1.0]))
    ```

    ??? cite
        [Pitfalls of Epistemic Uncertainty Quantification through Loss Minimisation](https://arxiv.org/abs/2203.06102)
    """
    name = "methods.heads.decompose_dirichlet"
    checked = check_concentration(name, concentration)
    check_positive(name, concentration)
    strength = jnp.sum(checked, axis=-1, keepdims=True)
    mean = checked / strength
    total = -jnp.sum(mean * jnp.log(mean), axis=-1)
    aleatoric = jnp.sum(mean * (digamma(strength + 1) - digamma(checked + 1)), axis=-1)
    # With much evidence, the difference of the two entropies is small and may round below zero.
    epistemic = jnp.maximum(total - aleatoric, 0)
    return Decomposition(total, total - epistemic, epistemic)


def check_concentration(name: str, concentration: ArrayLike) -> Array:
    """Raises unless `concentration` is `(*batch, classes)`. Returns it; `check_positive` checks its values."""
    array = check_floating(name, "concentration", concentration)
    if array.ndim < 1 or array.shape[-1] < 2:
        needs = "`concentration` of shape (*batch, classes), of at least two classes"
        raise ValueError(needs_message(name, needs, f"got shape {array.shape}", "The classes are the last axis."))
    return promote(array)[0]


def check_positive(name: str, concentration: ArrayLike, *, mask: ArrayLike | None = None) -> None:
    """Raises unless the unmasked parameters of Dirichlet distributions are above zero (if concrete)."""
    fix = "Outputs of a last layer? `methods.heads.dirichlet` maps them to a concentration."
    check_above(name, "concentration", concentration, 0, fix=fix, mask=mask)
