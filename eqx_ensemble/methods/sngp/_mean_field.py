import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from ..._check import check_floating_arrays, check_number, check_variance


def mean_field(
    mean: Float[ArrayLike, "*batch"], variance: Float[ArrayLike, "*batch"], *, factor: float | int = math.pi / 8
) -> Float[Array, "*batch"]:
    r"""Logits whose softmax or sigmoid approximates the mean probability under Gaussian logits.

    $\mu / \sqrt{1 + \lambda \sigma^2}$ for each logit. With $\lambda = \pi / 8$ the sigmoid is MacKay's approximation
    of the mean probability, accurate to about 0.01; the authors of SNGP tune $\lambda$, for example 20 on CIFAR-100,
    which moves uncertain rows much closer to uniform probabilities. For a softmax it is a heuristic: variance common to
    all classes changes probabilities, although a common shift of the logits would not.

    **Arguments:**

    - `mean`, `variance`: the mean and variance of the logits, of equal shapes, such as those of
        [`eqx_ensemble.methods.sngp.SNGPOutput`][], with or without a `members` axis.
    - `factor`: $\lambda$, zero or more.

    **Returns:** logits of the shape of `mean`.

    **Raises:** `TypeError` for arguments that are not floating-point; `ValueError` for shapes that differ, and for
    negative variances (where concrete).

    ```python
    # The mean probability is 0.697, not sigmoid(1) = 0.731
    jax.nn.sigmoid(ee.methods.sngp.mean_field(jnp.array([1.0]), jnp.array([1.0])))  # 0.700
    ```

    ??? cite
        [Uncertainty Estimation with Infinitesimal Jackknife, Its Distribution and Mean-Field
        Approximation](https://arxiv.org/abs/2006.07584), Lu et al., 2020.
    """
    name = "methods.sngp.mean_field"
    centre, variances = check_floating_arrays(name, mean=mean, variance=variance)
    check_variance(name, variance, positive=False)
    return centre / jnp.sqrt(1 + check_number(factor, "factor", name=name, least=0) * variances)
