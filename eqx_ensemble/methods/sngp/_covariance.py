from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ..._axes._check_rows import check_rows_of_data, explain_rows
from ..._check import check_positive_int
from ..._compiled import filter_jit
from ..._ensemble import Ensemble
from ..._ensemble._check import check_ensemble, check_model_state, check_model_state_given
from ..._foreign import from_foreign_tree
from ..._pytree import PyTree
from ...plan import AnyPlan
from ...plan._map import map_members
from ...train.compiled._program import take_rows
from ._check import check_sngp
from ._model import SNGP


def update_covariance(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    batch_size: int | None = None,
    state: eqx.nn.State | None = None,
    plan: AnyPlan = None,
) -> Ensemble[Any]:
    r"""Computes the covariances of the last layers in one pass over the training data, after training.

    The precision is $\text{ridge}\, I + \sum_i v_i \phi_i \phi_i^\top$, the exact sum over the rows, where $v_i$ is
    $1 / \text{noise variance}$ for a Gaussian likelihood, and $p_i (1 - p_i)$ for each logit otherwise: the Laplace
    approximation at the trained weights. Previous covariances are replaced. The sum is accumulated as a triangular
    factor, by a QR decomposition per batch, which loses half as many digits as the precision itself.

    **Arguments:**

    - `ensemble`: members that are [`eqx_ensemble.methods.sngp.SNGP`][], after training.
    - `x`: the inputs of the training data, a PyTree of arrays `(rows, ...)`, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][]. Labels are not used.
    - `batch_size`: rows per update; by default the number of features, or all rows if they are fewer. It only affects
        time and memory.
    - `state`: the stacked `equinox.nn.State` of stateful members; networks are called in inference mode.
    - `plan`: how the members are executed, as for [`eqx_ensemble.map_members`][].

    **Returns:** the ensemble with the new covariances.

    **Raises:** `TypeError` for members of another type; `TypeError` or `ValueError` for invalid data or state.

    ```python
    make = lambda key: ee.methods.sngp.SNGP(eqx.nn.Identity(), 3, 1, num_features=64, key=key)
    ensemble = ee.methods.sngp.update_covariance(ee.build(make, 4, key=key), jnp.zeros((50, 3)))
    near, far = ee.predict(ensemble, jnp.array([[0.1, 0, 0], [9, 0, 0]])).variance[0, :, 0]  # 0.03, 1.06
    ```

    ??? cite
        [Simple and Principled Uncertainty Estimation with Deterministic Deep Learning via Distance
        Awareness](https://arxiv.org/abs/2006.10108), Liu et al., 2020.
    """
    name = "methods.sngp.update_covariance"
    check_ensemble(ensemble, name=name)
    check_sngp(ensemble.stacked, SNGP)
    check_model_state_given(ensemble.stacked, state, name=name)
    check_model_state(state, ensemble.num_members, name=name)
    x = from_foreign_tree(x, "x", name=name)
    num_rows = check_rows_of_data(x, ensemble.num_members, argument="x", name=name)
    weight = ensemble.shared.weight if ensemble.stacked.weight is None else ensemble.stacked.weight
    size = weight.shape[-1] if batch_size is None else check_positive_int(batch_size, "batch_size", name=name)
    with explain_rows(x, name=name):
        root = _roots(ensemble, state, x, num_rows, min(size, num_rows), plan)
    roots = lambda e: (e.stacked.root.value, e.shared.root.value)  # the initial zeros may be shared
    return eqx.tree_at(roots, ensemble, (root, None), is_leaf=lambda x: x is None)


@filter_jit
def _roots(
    ensemble: Ensemble[Any], state: eqx.nn.State | None, x: PyTree, num_rows: int, size: int, plan: AnyPlan
) -> Array:
    def one(model: SNGP[Any], state: eqx.nn.State | None, x: PyTree) -> Array:
        return _root(eqx.nn.inference_mode(model), state, x, num_rows, size)

    return map_members(one, plan=plan)(ensemble, state, x)


def _root(model: SNGP[Any], state: eqx.nn.State | None, x: PyTree, num_rows: int, size: int) -> Array:
    """The inverse of the transposed triangular factor of one member's precision."""
    network: Any = model.network
    hidden = network if state is None else lambda row: network(row, state)[0]
    old = model.root.value
    start = jnp.broadcast_to(model.ridge**0.5 * jnp.eye(old.shape[-1], dtype=old.dtype), old.shape)

    def update(factor: Array, number: Array) -> tuple[Array, None]:
        rows = number * size + jnp.arange(size)
        phi = jax.vmap(lambda row: model.features(hidden(row)))(take_rows(x, jnp.minimum(rows, num_rows - 1)))
        # The last batch is padded by repeating the last row with weight zero.
        curvature = jnp.where((rows < num_rows)[:, None], _curvature(model, phi), 0)
        scaled = jnp.sqrt(curvature).T[:, :, None] * phi[None]
        scaled = (scaled if old.ndim == 3 else scaled[0]).astype(old.dtype)
        return jnp.linalg.qr(jnp.concatenate([factor, scaled], axis=-2), mode="r"), None

    factor, _ = jax.lax.scan(update, start, jnp.arange(-(-num_rows // size)))
    invert = lambda r: solve_triangular(r, jnp.eye(r.shape[0], dtype=r.dtype), trans="T")
    return jax.vmap(invert)(factor) if old.ndim == 3 else invert(factor)


def _curvature(model: SNGP[Any], phi: Float[Array, "rows features"]) -> Float[Array, "rows out"]:
    """Second derivatives of the negative log-likelihood with respect to each logit; one column for Gaussian outputs."""
    if model.likelihood == "gaussian":
        return jnp.full((phi.shape[0], 1), 1 / model.noise_variance, phi.dtype)
    logits = phi @ model.weight.T.astype(phi.dtype)
    if model.likelihood == "bernoulli":
        return jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits)
    probabilities = jax.nn.softmax(logits, axis=-1)
    return probabilities * (1 - probabilities)
