import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from ... import _keys
from ..._check import check_number
from ._check import check_known, check_model
from ._convert import Select, replace_layers, select_layers
from ._joint import JointEnsemble
from ._layers import MaskInputs, input_shape

M = TypeVar("M")


def masksembles(
    model: M, num_submembers: int = 4, *, scale: float | int = 2.0, where: Select = None, key: Any
) -> JointEnsemble[M]:
    r"""Converts a model to Masksembles: each sub-member uses a fixed subset of the hidden features.

    Weights and biases are shared; the masks are booleans, which are not trained, and activations are not rescaled. Each
    of $n$ masks keeps $m$ of $c$ features, the integer closest to the solution of $c = m s (1 - (1 - 1/s)^n)$ for the
    scale $s$. Every feature is kept by at least one mask. The overlap of two masks (intersection over union) is about
    $1 / (2 s - 1)$: sub-members are identical at a scale of 1 and nearly disjoint at a large one.

    **Arguments:**

    - `model`: the model of ONE member. Its hidden features are divided between sub-members: make it wider than a single
        model.
    - `num_submembers`: $n$, the number of masks.
    - `scale`: $s$, at least 1. The authors use 1 to 6, for layers of at least ten features.
    - `where`: the layers whose INPUTS are masked: features of linear layers, channels of convolutions; by default all
        linear layers and convolutions except the first, in the order of the model's fields.
    - `key`: the root key. The same key gives the same masks, also inside `jax.jit` and `build`.

    **Returns:** [`eqx_ensemble.methods.efficient.JointEnsemble`][]. The authors divide each batch between the masks:
    `mean_loss(loss, rows="split")`.

    **Raises:** `TypeError` or `ValueError` as [`eqx_ensemble.methods.efficient.batch_ensemble`][], and for a scale
    below 1.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.masksembles(model, 4, scale=2.0, key=key)
    joint.model.layers[1].mask.sum(axis=1)  # [34 34 34 34] of 64 features
    ```

    ??? cite

        Durasov, Bagautdinov, Baque and Fua, *Masksembles for Uncertainty Estimation*, CVPR 2021, arXiv:2012.08334.
    """
    name = "methods.efficient.masksembles"
    num_submembers = check_model(model, num_submembers, key, name=name)
    scale = check_number(scale, "scale", name=name, least=1)
    find_all, layers = select_layers(model, where, least=2 if where is None else 1, name=name)
    find = (lambda tree: find_all(tree)[1:]) if where is None else find_all
    layers = layers[1:] if where is None else layers
    check_known(layers, name=name)
    root = _keys.member_keys(key, 1, purpose="masksembles")[0]
    new = []
    for i, layer in enumerate(layers):
        shape = input_shape(layer)
        masks = draw_masks(jax.random.fold_in(root, i), num_submembers, math.prod(shape), scale)
        new.append(MaskInputs(layer, masks.reshape((num_submembers, *shape))))
    return JointEnsemble(replace_layers(model, find, new), num_submembers)


def draw_masks(key: Key[Array, ""], num_masks: int, width: int, scale: float) -> Bool[Array, "masks width"]:
    """Draws masks with equal numbers of features, such that at least one mask keeps each feature.

    A feature that no mask keeps replaces, in one mask, a feature that several masks keep. Unlike redrawing until all
    features are kept, this terminates.
    """
    solution = width / (scale * (1 - (1 - 1 / scale) ** num_masks))
    kept = min(max(round(solution), math.ceil(width / num_masks)), width)
    draw_key, move_key = jax.random.split(key)
    order = jnp.argsort(jax.random.uniform(draw_key, (num_masks, width)), axis=1)
    masks = jnp.argsort(order, axis=1) < kept

    def cover(masks: Array) -> Array:
        count = masks.sum(axis=0)
        feature = jnp.argmin(count)  # the first without a mask
        lots = jax.random.uniform(jax.random.fold_in(move_key, feature), masks.shape)
        donor = jnp.argmax(jnp.where(masks & (count > 1)[None], lots, -1.0))
        mask, taken = jnp.divmod(donor, width)
        return masks.at[mask, taken].set(False).at[mask, feature].set(True)

    return jax.lax.while_loop(lambda masks: ~jnp.all(masks.any(axis=0)), cover, masks)
