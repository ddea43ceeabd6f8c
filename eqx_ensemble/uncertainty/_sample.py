from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

from .._boundary import Logits, Samples, VariancesOrZero, Weights, array_function
from .._keys import root


@array_function
def sample_gaussian_mixture(
    mean: Samples,
    variance: VariancesOrZero,
    num_samples: int,
    *,
    joint: bool = False,
    weights: Weights = None,
    key: Any,
) -> Float[Array, " samples *batch"]:
    """Samples the mixture of the members' Gaussians: draws a member by its weight, then a value from its Gaussian.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`.
    - `num_samples`: the number of samples.
    - `joint`: whether all entries of a sample come from the same member; otherwise each entry draws a member
        independently, with the same marginal distributions.
    - `weights`: over members, `(members,)`.
    - `key`: one threefry key, typed or legacy.

    **Returns:**

    Samples `(samples, *batch)`, differentiable in mean and variance (not in the weights).

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.sample_gaussian_mixture(mean, variance, 9, key=key).shape  # (9, 1)
    ```
    """
    which, noise = jax.random.split(root(key))
    members = _members(mean.shape[0], weights, (num_samples, *mean.shape[1:]), joint, which)
    point = variance == 0
    sigma = jnp.where(point, 0, jnp.sqrt(jnp.where(point, 1, variance)))
    drawn = jax.random.normal(noise, members.shape, mean.dtype)
    return jnp.take_along_axis(mean, members, axis=0) + jnp.take_along_axis(sigma, members, axis=0) * drawn


@array_function
def sample_class_mixture(
    logits: Logits, num_samples: int, *, joint: bool = False, weights: Weights = None, key: Any
) -> Int32[Array, " samples *batch"]:
    """Samples labels from the mixture of the members: draws a member by its weight, then a class by its probabilities.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `num_samples`, `joint`, `weights`, `key`: as for [`eqx_ensemble.uncertainty.sample_gaussian_mixture`][].

    **Returns:**

    Labels `(samples, *batch)`, from 0 to classes - 1.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.5, 0.5]]]))
    jnp.mean(ee.uncertainty.sample_class_mixture(logits, 1000, key=key))  # about 0.3
    ```
    """
    which, noise = jax.random.split(root(key))
    shape = (num_samples, *logits.shape[1:-1])
    members = _members(logits.shape[0], weights, shape, joint, which)

    def one(sample: tuple[Array, Array]) -> Array:
        members, key = sample
        chosen = jnp.take_along_axis(logits, members[None, ..., None], axis=0)[0]
        return jax.random.categorical(key, chosen, axis=-1)

    # One sample at a time: the logits of all samples would be large.
    return jax.lax.map(one, (members, jax.random.split(noise, num_samples))).astype(jnp.int32)


def _members(
    num_members: int,
    weights: Float[Array, " members"] | None,
    shape: tuple[Any, ...],
    joint: bool,  # noqa: FBT001
    key: Key[Array, ""],
) -> Int32[Array, " samples *batch"]:
    """The member from which each entry of each sample is drawn."""
    drawn = (shape[0],) + (1,) * (len(shape) - 1) if joint else shape
    if weights is None:
        members = jax.random.randint(key, drawn, 0, num_members)
    else:
        members = jax.random.choice(key, num_members, drawn, p=weights)
    return jnp.broadcast_to(members.astype(jnp.int32), shape)
