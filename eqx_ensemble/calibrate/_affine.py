from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._brief import brief_doc
from .._check import RowWeightsLike, check_number, check_positive_int, standard_promotion
from .._pytree import PyTree
from ._pooling import Pool, Pooling, Rows, fit_rows, no_gradient_message, warn_of_no_minimum


class Minimum(NamedTuple):
    """The minimiser of a function, and whether its gradient vanishes there."""

    at: PyTree
    flat: Bool[Array, ""]


def minimise(
    fn: Callable[[PyTree], Float[Array, ""]], start: PyTree, scale: Float[Array, ""], max_steps: int
) -> Minimum:
    """The minimum of a smooth convex function by L-BFGS; `scale` is the scale of its gradients."""
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(fn)
    precision = jnp.finfo(scale.dtype).eps * scale

    def step(carry: tuple) -> tuple:
        params, state, *_, count = carry
        value, grad = value_and_grad(params, state=state)
        updates, new_state = optimiser.update(grad, state, params, value=value, grad=grad, value_fn=fn)
        new_params = optax.apply_updates(params, updates)
        return new_params, _cast_like(new_state, state), _largest(grad), _largest(updates), count + 1

    def goes_on(carry: tuple) -> Array:
        *_, slope, moved, count = carry
        return (slope > precision) & (moved > 0) & (count < max_steps)

    # optax promotes dtypes and ranks, which the user's configuration may forbid.
    with standard_promotion():
        state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), optimiser.init(start))
        far = jnp.asarray(jnp.inf, scale.dtype)
        params, *_ = jax.lax.while_loop(goes_on, step, (start, state, far, far, 0))
        # Rounding of the value ends a line search at gradients of about the square root of the rounding.
        flat = _largest(jax.grad(fn)(params)) <= 10 * jnp.sqrt(precision * scale)
    return Minimum(params, flat)


def _largest(tree: PyTree) -> Float[Array, ""]:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)]))


def _cast_like(new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), new, old)


class Vector(eqx.Module):
    """Fitted vector scaling.

    **Attributes:**

    - `scale`, `bias`: `(groups, classes)`: calibrated logits are `scale` times the log-probabilities, plus `bias`.
    - `pooling`: that of the fit.
    """

    scale: Float[Array, "groups classes"]
    bias: Float[Array, "groups classes"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        return jax.vmap(_by_vector)(self.pooling.logs(logits), self.scale, self.bias)


class Matrix(eqx.Module):
    """Fitted matrix (Dirichlet) scaling.

    **Attributes:**

    - `matrix`, `bias`: `(groups, classes, classes)` and `(groups, classes)`: calibrated logits are the product of
        `matrix` with the log-probabilities of a row, plus `bias`.
    - `pooling`: that of the fit.
    """

    matrix: Float[Array, "groups classes classes"]
    bias: Float[Array, "groups classes"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        return jax.vmap(_by_matrix)(self.pooling.logs(logits), self.matrix, self.bias)


def vector(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    max_steps: int = 1000,
) -> Vector:
    r"""Vector scaling: a scale and a bias for the log-probability of each class, fitted by maximum likelihood.

    The mean of $-\log \mathrm{softmax}(w \odot \log p + b)_y$ over rows is convex in $w$ and $b$, and is minimised by
    optax's L-BFGS from $w = 1, b = 0$. An arbitrary offset of a row's logits has no effect.

    **Arguments:**

    - `logits`, `labels`, `pool`, `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.temperature`][].
    - `max_steps`: the maximum number of L-BFGS steps.
    - the others: as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Vector`][]. Warns if no minimum was reached; none exists for separable rows.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4 + [[0.2, 0.8]] * 4]))
    labels = jnp.array([0, 0, 0, 1, 0, 0, 1, 1])
    fitted = ee.calibrate.vector(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::4]  # [[0.75, 0.25], [0.5, 0.5]]
    ```

    ??? cite
        [Guo et al. 2017](https://arxiv.org/abs/1706.04599)
    """
    name = "calibrate.vector"
    steps = check_positive_int(max_steps, "max_steps")
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    rows = rows._replace(logs=_constant(name, rows.logs))
    scale, bias, found = _fit_vector(rows, steps)
    warn_of_no_minimum(pool, found, "use `calibrate.matrix` with penalties")
    return Vector(scale, bias, pooling)


def matrix(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    off_diagonal_penalty: float = 0.0,
    bias_penalty: float = 0.0,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    max_steps: int = 1000,
) -> Matrix:
    r"""Matrix scaling of log-probabilities, which is Dirichlet calibration.

    The mean of $-\log \mathrm{softmax}(W \log p + b)_y$ over rows, plus $\lambda$ times the mean square of the entries
    of $W$ off its diagonal and $\mu$ times that of $b$, is minimised by optax's L-BFGS from the identity. With many
    classes and few rows it overfits without penalties.

    **Arguments:**

    - `off_diagonal_penalty`, `bias_penalty`: $\lambda$ and $\mu$, non-negative: choose them by cross-validation.
    - `logits`, `labels`, `pool`, `weights`, `row_weights`, `max_steps`: as for [`eqx_ensemble.calibrate.vector`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Matrix`][], with the warning of `vector`. Without penalties, only predictions are unique.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4 + [[0.2, 0.8]] * 4]))
    labels = jnp.array([0, 0, 0, 1, 0, 0, 1, 1])
    fitted = ee.calibrate.matrix(logits, labels, pool="mixture")
    jnp.exp(fitted(logits))[0, ::4]  # [[0.75, 0.25], [0.5, 0.5]]
    ```

    ??? cite
        [Kull et al. 2019](https://arxiv.org/abs/1910.12656)
    """
    name = "calibrate.matrix"
    steps = check_positive_int(max_steps, "max_steps")
    check_number(off_diagonal_penalty, "off_diagonal_penalty", least=0)
    check_number(bias_penalty, "bias_penalty", least=0)
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    rows = rows._replace(logs=_constant(name, rows.logs))
    penalties = jnp.asarray([off_diagonal_penalty, bias_penalty], rows.logs.dtype)
    fitted, bias, found = _fit_matrix(rows, penalties, steps)
    warn_of_no_minimum(pool, found, "add a penalty")
    return Matrix(fitted, bias, pooling)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, logs: Array) -> Array:
    """The identity; its gradient raises an error."""
    return logs


@_constant.defjvp
def _refuse_gradient(name: str, primals: tuple, tangents: tuple) -> NoReturn:
    raise NotImplementedError(no_gradient_message(name))


@partial(jax.jit, static_argnames="max_steps")
def _fit_vector(rows: Rows, max_steps: int) -> tuple[Array, Array, Array]:
    def of_group(logs: Array) -> tuple[Array, Array, Array]:
        loss = lambda params: _loss(_by_vector(logs, *params), rows)
        start = (jnp.ones(logs.shape[-1], logs.dtype), jnp.zeros(logs.shape[-1], logs.dtype))
        (scale, bias), flat = minimise(loss, start, _size(logs, rows), max_steps)
        return scale, bias, flat & ~_is_separable(_by_vector(logs, scale, bias), rows)

    return jax.vmap(of_group)(rows.logs)


@partial(jax.jit, static_argnames="max_steps")
def _fit_matrix(rows: Rows, penalties: Float[Array, "2"], max_steps: int) -> tuple[Array, Array, Array]:
    num_classes = rows.logs.shape[-1]
    diagonal = jnp.eye(num_classes, dtype=bool)
    per_entry = penalties / jnp.asarray([num_classes * (num_classes - 1), num_classes], penalties.dtype)
    # Parameters are scaled to similar curvature of the penalties and the loss: L-BFGS then takes few steps.
    unit = 1 / jnp.sqrt(1 + 2 * per_entry)

    def of_group(logs: Array) -> tuple[Array, Array, Array]:
        def parameters(scaled: tuple[Array, Array]) -> tuple[Array, Array]:
            return jnp.where(diagonal, scaled[0], scaled[0] * unit[0]), scaled[1] * unit[1]

        def loss(scaled: tuple[Array, Array]) -> Array:
            matrix, bias = parameters(scaled)
            squares = jnp.sum(jnp.where(diagonal, 0, matrix) ** 2), jnp.sum(bias**2)
            return _loss(_by_matrix(logs, matrix, bias), rows) + per_entry[0] * squares[0] + per_entry[1] * squares[1]

        start = (jnp.eye(num_classes, dtype=logs.dtype), jnp.zeros(num_classes, logs.dtype))
        scaled, flat = minimise(loss, start, _size(logs, rows), max_steps)
        matrix, bias = parameters(scaled)
        # Only parameters without a penalty can diverge.
        free = jnp.where(diagonal | (penalties[0] == 0), matrix, 0), jnp.where(penalties[1] == 0, bias, 0)
        return matrix, bias, flat & ~_is_separable(_by_matrix(logs, *free), rows)

    return jax.vmap(of_group)(rows.logs)


def _by_vector(logs: Array, scale: Array, bias: Array) -> Float[Array, "*batch classes"]:
    along = lambda x: jnp.reshape(x, (1,) * (logs.ndim - 1) + x.shape)
    return jax.nn.log_softmax(logs * along(scale) + along(bias), axis=-1)


def _by_matrix(logs: Array, matrix: Array, bias: Array) -> Float[Array, "*batch classes"]:
    along = jnp.reshape(bias, (1,) * (logs.ndim - 1) + bias.shape)
    product = jnp.matmul(logs, matrix.T, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.log_softmax(product + along, axis=-1)


def _loss(logs: Float[Array, "rows classes"], rows: Rows) -> Float[Array, ""]:
    return -jnp.sum(rows.share * jnp.take_along_axis(logs, rows.labels[:, None], axis=-1)[:, 0])


def _is_separable(logs: Float[Array, "rows classes"], rows: Rows) -> Bool[Array, ""]:
    """Whether every label is the most likely class: the loss then has no minimum."""
    return jnp.all((jnp.argmax(logs, axis=-1).astype(rows.labels.dtype) == rows.labels) | (rows.share == 0))


def _size(logs: Float[Array, "rows classes"], rows: Rows) -> Float[Array, ""]:
    """The scale of the gradients: that of the mean log-probability."""
    return 1 + jnp.sum(rows.share[:, None] * jnp.abs(logs)) / logs.shape[-1]
