"""Update directions of interacting particles: for one particle, given all particles."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from ..._compiled import filter_jit
from ..._foreign import as_hashable_leaf
from ..._pytree import PyTree
from ._check import check_kernel, check_kernel_value, check_particles
from ._kernels import RBF, AbstractKernel, Kernel

Method = Literal["svgd", "wgd"]


def svgd(
    points: Float[ArrayLike, "members size"],
    scores: Float[ArrayLike, "members size"],
    *,
    kernel: Kernel | None = None,
    active: Bool[ArrayLike, " members"] | None = None,
) -> Float[Array, "members size"]:
    r"""The update directions of Stein variational gradient descent (SVGD) for all particles.

    $\phi_i = \frac1n \sum_j k(x_j, x_i) \, s_j + \nabla_{x_j} k(x_j, x_i)$, with the scores $s_j$, the gradients of the
    log-density of the target. The first term moves particles towards high density, the second away from each other. A
    single particle follows its own score to the maximum.

    Members interact: the direction of each depends on all others. This takes time of order $n^2$ times `size`, and
    memory for a few arrays `(members, size)`.

    **Arguments:**

    - `points`: the particles, `(members, size)`.
    - `scores`: the gradients of the log-density at the points, `(members, size)`.
    - `kernel`: a function of two vectors `(size,)`, or an [`eqx_ensemble.methods.particles.AbstractKernel`][]; by
        default [`eqx_ensemble.methods.particles.RBF`][] with the median bandwidth.
    - `active`: booleans `(members,)`; particles where it is `False` are ignored, even if they are NaN, and have zero
        directions.

    **Returns:** the directions `(members, size)`, for updates `points + rate * directions`.

    **Raises:** `TypeError` or `ValueError` for arrays that are not floating-point or not of one shape
    `(members, size)`, and for a kernel that does not return a floating-point scalar.

    ```python
    points = jnp.array([[-1.0], [2.0]])
    # a standard normal target
    ee.methods.particles.svgd(points, -points)  # [[-0.116], [-0.634]]
    ```

    ??? cite

        [Stein Variational Gradient Descent: A General Purpose Bayesian Inference
        Algorithm](https://arxiv.org/abs/1608.04471), Liu and Wang, 2016.
    """
    return _all_directions("svgd", points, scores, kernel, active)


def wgd(
    points: Float[ArrayLike, "members size"],
    scores: Float[ArrayLike, "members size"],
    *,
    kernel: Kernel | None = None,
    active: Bool[ArrayLike, " members"] | None = None,
) -> Float[Array, "members size"]:
    r"""The update directions of Wasserstein gradient descent with a kernel density estimate, for repulsive ensembles.

    $\phi_i = s_i - \nabla_{x_i} \log \sum_j k(x_i, x_j)$: each particle follows its own score $s_i$, and is repelled by
    a high density of particles. Unlike in SVGD, scores of other particles have no effect, so directions do not shrink
    with many particles whose kernel values are near zero.

    Members interact: the direction of each depends on all others. This takes time of order $n^2$ times `size`, and
    memory for a few arrays `(members, size)`.

    **Arguments:**

    - `points`: the particles, `(members, size)`.
    - `scores`: the gradients of the log-density at the points, `(members, size)`.
    - `kernel`: a function of two vectors `(size,)` with positive values, or an
        [`eqx_ensemble.methods.particles.AbstractKernel`][]; by default [`eqx_ensemble.methods.particles.RBF`][] with
        the median bandwidth.
    - `active`: booleans `(members,)`; particles where it is `False` are ignored, even if they are NaN, and have zero
        directions.

    **Returns:** the directions `(members, size)`, for updates `points + rate * directions`.

    **Raises:** as [`eqx_ensemble.methods.particles.svgd`][].

    ```python
    points = jnp.array([[-0.1], [0.1]])
    # repelled from each other more than attracted by a standard normal target
    ee.methods.particles.wgd(points, -points)  # [[-2.21], [2.21]]
    ```

    ??? cite

        [Repulsive Deep Ensembles are Bayesian](https://arxiv.org/abs/2106.11642), D'Angelo and Fortuin, 2021.
    """
    return _all_directions("wgd", points, scores, kernel, active)


def _all_directions(method: Method, points: Any, scores: Any, kernel: Any, active: Any) -> Float[Array, "members size"]:
    name = f"methods.particles.{method}"
    kernel = RBF() if kernel is None else kernel
    check_kernel(name, kernel)
    kernel = as_hashable_leaf(kernel)
    points, scores, active = check_particles(name, points, scores, active)
    return _move_all(method, kernel, points, scores, active)


@filter_jit
def _move_all(method: Method, kernel: Kernel, points: Array, scores: Array, active: Array) -> Array:
    one_by_one = lambda fn, parts: jax.lax.map(fn, parts)
    return directions(method, kernel, points, scores, active, run=one_by_one)


def directions(
    method: Method,
    kernel: Kernel,
    points: Float[Array, "members size"],
    scores: Float[Array, "members size"],
    active: Bool[Array, " members"],
    *,
    run: Callable[[Callable[[PyTree], PyTree], PyTree], PyTree],
    gather: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, "members size"]:
    """The directions of all particles; zero for inactive ones.

    `run` maps a function of one particle sequentially over all particles: a batched map would need an array
    `(members, members, size)`. `gather` replicates all particles on every device.
    """
    points, scores = (jnp.where(active[:, None], x, jnp.zeros_like(x)) for x in (points, scores))
    # Inactive particles are replaced by an active one, because a kernel may be undefined at other points, such as zero.
    points = jnp.where(active[:, None], points, points[jnp.argmax(active)][None])
    others = (gather(points), gather(scores), gather(active))
    if isinstance(kernel, AbstractKernel):
        distances = run(lambda point: jnp.sum((others[0] - point[None]) ** 2, axis=1), points)
        kernel = kernel.adapt(gather(distances), others[2])
    value = lambda x, y: check_kernel_value(f"methods.particles.{method}", kernel(x, y))
    found = run(lambda part: _RULES[method](value, *part, *others), (points, scores))
    return jnp.where(active[:, None], found, jnp.zeros_like(found))


def _svgd(kernel: Kernel, point: Array, _: Array, points: Array, scores: Array, active: Array) -> Array:
    """SVGD for one particle."""

    def weigh(points: Array) -> tuple[Array, Array]:
        values = jnp.where(active, jax.vmap(lambda other: kernel(other, point))(points), 0)
        return jnp.sum(values), values

    repulsion, values = jax.grad(weigh, has_aux=True)(points)
    count = jnp.maximum(jnp.sum(active), 1).astype(points.dtype)
    drift = jnp.matmul(values, scores, precision="highest")
    return (drift + jnp.sum(repulsion, axis=0)) / count


def _wgd(kernel: Kernel, point: Array, score: Array, points: Array, _: Array, active: Array) -> Array:
    """WGD for one particle."""

    def log_density(x: Array) -> Array:
        return jnp.log(jnp.sum(jnp.where(active, jax.vmap(lambda other: kernel(x, other))(points), 0)))

    return score - jax.grad(log_density)(point)


_RULES = {"svgd": _svgd, "wgd": _wgd}
