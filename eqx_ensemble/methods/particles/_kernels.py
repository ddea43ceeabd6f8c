import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..._check import check_number, is_traced
from ._check import above_zero_message

Kernel = Callable[[Array, Array], Any]
"""A function of two flat vectors; an `AbstractKernel` may also depend on all particles."""


class AbstractKernel(eqx.Module):
    """A kernel that adapts to the particles, like the bandwidth of [`eqx_ensemble.methods.particles.RBF`][].

    A kernel that does not adapt is a plain function of two flat vectors:
    `lambda x, y: 1 / jnp.sqrt(1 + jnp.sum((x - y) ** 2))`.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, " size"], y: Float[Array, " size"]) -> Float[Array, ""]:
        """The kernel of two particles. It must be symmetric and differentiable, including where they are equal."""

    @abc.abstractmethod
    def adapt(
        self, squared_distances: Float[Array, "members members"], active: Bool[Array, " members"]
    ) -> "AbstractKernel":
        """Returns the kernel for these particles; called in every step.

        `active` marks the members that take part; distances of the others must be ignored.
        """


class RBF(AbstractKernel):
    r"""The Gaussian kernel $k(x, y) = \exp(-|x - y|^2 / b)$.

    By default, the bandwidth $b = m^2 / \log n$ is recomputed in every step, where $m$ is the median distance between
    pairs of the $n$ active members. The kernel values of each member with the others then sum to about 1. The bandwidth
    is treated as constant in derivatives. For a single member, or if all members are equal, $b = 1$, which has no
    effect.

    In many dimensions all distances are similar, and SVGD with this bandwidth underestimates the variance: with 20
    particles, that of a standard normal distribution is 0.88 in one dimension, 0.37 in five, and 0.15 in twenty.

    **Arguments:**

    - `bandwidth`: $b$, in squared units of the particles, above zero; `None` for the median rule.

    ```python
    kernel = ee.methods.particles.RBF(bandwidth=2.0)
    kernel(jnp.zeros(2), jnp.ones(2))  # exp(-1) = 0.368
    ```

    ??? cite

        [Stein Variational Gradient Descent: A General Purpose Bayesian Inference
        Algorithm](https://arxiv.org/abs/1608.04471), Liu and Wang, 2016.
    """

    bandwidth: Any = None

    def __check_init__(self) -> None:
        name = "methods.particles.RBF"
        if self.bandwidth is None or is_traced(self.bandwidth):
            return
        value = self.bandwidth
        value = value.item() if isinstance(value, jax.Array) and not value.shape else value
        if check_number(value, "bandwidth", name=name) <= 0:
            raise ValueError(above_zero_message(name, "bandwidth", value))

    def __call__(self, x: Float[Array, " size"], y: Float[Array, " size"]) -> Float[Array, ""]:
        """The kernel of two particles; `bandwidth=None` means $b = 1$ here."""
        bandwidth = jnp.asarray(1 if self.bandwidth is None else self.bandwidth, x.dtype)
        return jnp.exp(-jnp.sum((x - y) ** 2) / bandwidth)

    def adapt(self, squared_distances: Float[Array, "members members"], active: Bool[Array, " members"]) -> "RBF":
        """Returns the kernel with the median bandwidth of these particles, unless a bandwidth is set."""
        if self.bandwidth is not None:
            return self
        return RBF(median_bandwidth(jax.lax.stop_gradient(squared_distances), active))


def median_bandwidth(
    squared_distances: Float[Array, "members members"], active: Bool[Array, " members"]
) -> Float[Array, ""]:
    """The squared median distance between active members, divided by the logarithm of their number."""
    distances = jnp.sqrt(squared_distances)
    pairs = jnp.tril(active[None] & active[:, None], k=-1)
    ordered = jnp.sort(jnp.where(pairs, distances, jnp.inf), axis=None)
    count, members = jnp.sum(pairs), jnp.sum(active)
    last = jnp.maximum(count, 1) - 1
    median = ordered[last // 2] + (ordered[(last + 1) // 2] - ordered[last // 2]) / 2
    found = median**2 / jnp.log(jnp.maximum(members, 2).astype(distances.dtype))
    return jnp.where((count > 0) & (found > 0), found, jnp.ones_like(found))
