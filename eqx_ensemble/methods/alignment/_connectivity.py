from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from ..._caller import caller
from ..._check import (
    check_floating,
    check_function,
    check_integer,
    check_number,
    check_word,
    is_traced,
    kind_text,
    promote,
    value_error,
)
from ..._compiled import filter_jit
from ..._ensemble import Ensemble, M, check_ensemble, check_equal_members
from ..._foreign import as_hashable_leaf
from ..._leaf_text import leaf_text
from ...plan import AnyPlan
from ...plan._engine import over_members
from ._check import check_reference


def check_loss(value: Any) -> jax.Array:
    """Raises unless `value` is one real number. Returns it in at least float32."""
    found = value if isinstance(value, jax.Array | np.ndarray | np.generic) else np.asarray(value)
    if found.shape != () or not (jnp.issubdtype(found.dtype, jnp.floating) or found.dtype.kind in "iu"):
        got = kind_text(value) if found.dtype.kind == "O" else leaf_text(found)
        raise TypeError(
            f"`methods.alignment.connectivity` needs `fn` to return one real number, got {got}.\n"
            "For example `jnp.mean(errors)`."
        )
    return promote(jnp.asarray(found))[0]


def check_losses(losses: Any) -> jax.Array:
    """Raises unless `losses` are `(*batch, points)`, at least three points. Returns them in the dtype to compute in."""
    array = check_floating("losses", losses)
    if array.ndim < 1 or array.shape[-1] < 3:
        needs, fix = (
            "`losses` of shape (*batch, points), of at least three points",
            "`connectivity` returns such losses.",
        )
        raise value_error(needs, f"got shape {array.shape}", fix)
    return promote(array)[0]


def interpolate(ensemble: Ensemble[M], position: Real[ArrayLike, ""], *, reference: int = 0) -> Ensemble[M]:
    r"""Linearly interpolates between a reference member and every member: weights $(1 - \alpha) W_0 + \alpha W_m$.

    Both ends are exact. Arrays that are not floating-point must be equal in all members. BatchNorm needs
    [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `position`: $\alpha$, one number; values outside 0 to 1 extrapolate. It may be traced.
    - `reference`: the position of the member at $\alpha = 0$.

    **Returns:** the interpolated ensemble, with the same ids.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    halfway = ee.methods.alignment.interpolate(ensemble, 0.5)
    ```
    """
    check_ensemble(ensemble)
    value: Any = position
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.number) or jnp.iscomplexobj(value):
            raise TypeError(f"`{caller()}` needs `position` to be one number, got {leaf_text(value)}.")
        value = 0.0 if is_traced(value) else value.item()
    check_number(value, "position")
    first = check_reference(reference, ensemble.num_members)
    check_equal_members(eqx.filter(ensemble.arrays, eqx.is_inexact_array, inverse=True))
    return _interpolate(ensemble, position, first)


def connectivity(
    ensemble: Ensemble[Any],
    fn: Callable[..., Any],
    *args: Any,
    num_points: int = 11,
    reference: int = 0,
    plan: AnyPlan = None,
) -> Float[Array, "members points"]:
    """Losses along the straight lines in weight space from a reference member to each of the others.

    If they stay low, members are linearly connected, and their average is a good model.

    **Arguments:**

    - `ensemble`: the ensemble, for example before and after [`eqx_ensemble.methods.alignment.align`][].
    - `fn`: `fn(model, *args)`, the loss of one model in inference mode.
    - `args`: the data, as for [`eqx_ensemble.map_members`][].
    - `num_points`: the number of equally spaced points including both ends, at least three.
    - `reference`: the position of the member at which all lines start.
    - `plan`: as for [`eqx_ensemble.map_members`][]; with `plan.Sequential()`, one model is in memory at a time.

    **Returns:** `(members, points)`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x, y = jnp.ones((10, 3)), jnp.zeros((10, 1))
    mse = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    losses = ee.methods.alignment.connectivity(ensemble, mse, x, y)
    ee.methods.alignment.barrier(losses).shape  # (4,)
    ```

    ??? cite
        [Frankle et al. 2020](https://arxiv.org/abs/1912.05671)
    """
    check_ensemble(ensemble)
    check_function(fn, "fn", example="lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)")
    fn = as_hashable_leaf(fn)
    count = check_integer(num_points, "num_points", least=3)
    first = check_reference(reference, ensemble.num_members)
    check_equal_members(eqx.filter(ensemble.arrays, eqx.is_inexact_array, inverse=True))

    points = [jnp.asarray(p, jnp.result_type(float)) for p in np.linspace(0, 1, count)]
    return jnp.stack([_losses(ensemble, point, first, fn, args, plan) for point in points], axis=1)


@filter_jit
def _losses(
    ensemble: Ensemble[Any], position: Array, first: int, fn: Callable[..., Any], args: tuple[Any, ...], plan: AnyPlan
) -> Float[Array, " members"]:
    models = eqx.nn.inference_mode(_interpolate(ensemble, position, first))
    return over_members(lambda model, *args: check_loss(fn(model, *args)), plan=plan)(models, *args)


def barrier(
    losses: Float[ArrayLike, "*batch points"], *, baseline: Literal["line", "mean"] = "line"
) -> Float[Array, "*batch"]:
    r"""The height of the loss barrier along each line, in the unit of the loss.

    With losses $L(\alpha)$ at equally spaced points, it is the largest $L(\alpha) - (1 - \alpha) L(0) - \alpha L(1)$,
    as Entezari et al. define it. `baseline="mean"` is the largest $L(\alpha) - (L(0) + L(1)) / 2$ of Frankle et al.

    **Arguments:**

    - `losses`: `(*batch, points)`, from [`eqx_ensemble.methods.alignment.connectivity`][].
    - `baseline`: `"line"` or `"mean"`.

    **Returns:** `(*batch,)`.

    ```python
    # 1.5, above the line from 0 to 3
    ee.methods.alignment.barrier(jnp.array([0.0, 3.0, 3.0]))
    ```

    ??? cite
        [Entezari et al. 2022](https://arxiv.org/abs/2110.06296); [Frankle et al.
        2020](https://arxiv.org/abs/1912.05671)
    """
    checked = check_losses(losses)
    check_word(baseline, "baseline", ("line", "mean"))
    share = jnp.linspace(0, 1, checked.shape[-1], dtype=checked.dtype).reshape((1,) * (checked.ndim - 1) + (-1,))
    start, end = checked[..., :1], checked[..., -1:]
    base = (start + end) / 2 if baseline == "mean" else start + share * (end - start)
    return jnp.max(checked - base, axis=-1)


def _interpolate(ensemble: Ensemble[M], position: Any, first: int) -> Ensemble[M]:
    def between(leaf: Any) -> Any:
        if not eqx.is_inexact_array(leaf):
            return leaf
        end = leaf if jnp.finfo(leaf.dtype).bits >= 32 else jnp.asarray(leaf, jnp.float32)
        start, share = end[first : first + 1], jnp.asarray(position, jnp.finfo(end.dtype).dtype)
        # From the nearer end, so that both ends are exact and equal weights stay equal.
        way = end - start
        return jnp.where(share < 0.5, start + share * way, end - (1 - share) * way).astype(leaf.dtype)

    return Ensemble(jax.tree.map(between, ensemble.stacked), ensemble.shared, ensemble.ids)
