from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from ..._pytree import PyTree
from ...train import Frozen
from ._check import check_num_rows, check_penalised, check_penalty_std, check_real


def gaussian_penalty(model: PyTree, std: Any = 1.0, *, num_rows: Any) -> Float[Array, ""]:
    r"""The negative log-density of a Gaussian prior over one member's weights, per row: the prior term of a mean loss.

    $$\frac{1}{N} \sum_j \frac{w_j^2}{2 \sigma_j^2}$$

    over all floating-point leaves that are not [`eqx_ensemble.train.Frozen`][], up to a constant, in nats. Add it to a
    loss that is a **mean** over rows of negative log-likelihoods; $N$ times the sum is the negative log-posterior, from
    which [`eqx_ensemble.methods.sampling.sgld`][] samples. A mean squared error lacks the factor $1 / (2 s^2)$, with
    the standard deviation $s$ of the noise in the targets. Decoupled weight decay (AdamW) is not equivalent to this
    prior.

    **Arguments:**

    - `model`: the model of one member, as the loss receives it. Leaves that are not trained add a constant.
    - `std`: $\sigma$, one number, or a function of a leaf that returns one.
    - `num_rows`: $N$, the number of all training rows of the member, not of a batch. It scales the prior to a mean over
        rows.

    **Returns:** a scalar, at least float32.

    **Raises:** `TypeError` or `ValueError` for standard deviations or a number of rows that are not numbers above zero,
    complex weights, a model without weights, and an [`eqx_ensemble.Ensemble`][].

    ```python
    model = eqx.nn.Linear(3, 1, key=key)
    prior = ee.methods.priors.gaussian_penalty
    prior(model, num_rows=100)
    prior(model, lambda leaf: 1 / np.sqrt(leaf.shape[-1]), num_rows=100)
    ```
    """
    name = "methods.priors.gaussian_penalty"
    num_rows = check_num_rows(num_rows, name=name)
    found = jtu.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, Frozen))
    is_weight = lambda x: isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    weights = [(jtu.keystr(path), x) for path, x in found if is_weight(x)]
    check_penalised(weights, model, name=name)
    terms = []
    for path, x in weights:
        check_real(x, path, name=name)
        x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        own = std(jax.ShapeDtypeStruct(x.shape, x.dtype)) if callable(std) else std
        scale = jnp.asarray(check_penalty_std(own, "std" + path if callable(std) else "std", name=name))
        terms.append(jnp.sum((x / scale.astype(x.dtype)) ** 2) / 2)
    widest = np.result_type(*[term.dtype for term in terms])
    total = jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
    return total / jnp.asarray(num_rows).astype(widest)
