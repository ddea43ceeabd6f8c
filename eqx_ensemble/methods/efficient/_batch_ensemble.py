import math
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from ..._check import check_number, check_word
from ..._keys import member_keys
from .._layers import Select, check_known, input_shape, output_shape, select_layers
from ._convert import check_model, warn_alike
from ._joint import JointEnsemble
from ._layers import MaskInputs, Own, RankOne, redraw

M = TypeVar("M")


def masksembles(
    model: M, num_submembers: int = 4, *, scale: float | int = 2.0, where: Select = None, key: Any
) -> JointEnsemble[M]:
    """Converts a model to Masksembles: each sub-member uses a fixed subset of the hidden features.

    Weights are shared. Two masks overlap (intersection over union) by about $1 / (2 s - 1)$ for the scale $s$. The
    authors divide each batch between the masks: `mean_loss(loss, rows="split")`.

    **Arguments:**

    - `model`: make it wider than a single model.
    - `scale`: $s$, at least 1. The authors use 1 to 6, for layers of at least ten features.
    - `where`: the layers whose INPUTS are masked; by default all but the first.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.masksembles(model, 4, scale=2.0, key=key)
    joint.model.layers[1].mask.sum(axis=1)  # [34 34 34 34] of 64 features
    ```

    ??? cite
        [Durasov et al. 2021](https://arxiv.org/abs/2012.08334)
    """
    num_submembers = check_model(model, num_submembers, key)
    scale = check_number(scale, "scale", least=1)
    find_all, layers = select_layers(model, where, least=2 if where is None else 1)
    find = (lambda tree: find_all(tree)[1:]) if where is None else find_all
    layers = layers[1:] if where is None else layers
    check_known(layers)
    root = member_keys(key, 1, purpose="masksembles")[0]
    new = []
    for i, layer in enumerate(layers):
        shape = input_shape(layer)
        masks = draw_masks(jax.random.fold_in(root, i), num_submembers, math.prod(shape), scale)
        new.append(MaskInputs(layer, masks.reshape((num_submembers, *shape))))
    return JointEnsemble(eqx.tree_at(find, model, new), num_submembers)


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


def batch_ensemble(
    model: M,
    num_submembers: int,
    *,
    where: Select = None,
    factors: Literal["normal", "signs", "ones"] = "normal",
    std: float | int = 0.5,
    key: Any,
) -> JointEnsemble[M]:
    r"""Converts a model to a BatchEnsemble: sub-members whose weights differ by rank-one factors.

    Sub-member $i$ has the weights $W \circ s_i r_i^\top$ and its own bias: a layer needs `in + 2 * out` parameters per
    sub-member. $W$ and the first biases are those of the model, which may be trained already. Train factors as in
    [`eqx_ensemble.methods.efficient.weight_labels`][].

    **Arguments:**

    - `model`: other weights than those of `where` are shared.
    - `where`: the layers to convert; by default all outside [`eqx_ensemble.train.Frozen`][].
    - `factors`: the initial $r$ and $s$: `"normal"` with mean 1 and standard deviation `std`; `"signs"`, -1 or 1; or
        `"ones"`.
    - `std`: the authors use 0.5 for image models.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)  # 5,059 parameters
    joint = ee.methods.efficient.batch_ensemble(model, 4, key=key)  # 6,528
    ```

    ??? cite
        [Wen et al. 2020](https://arxiv.org/abs/2002.06715)
    """
    num_submembers = check_model(model, num_submembers, key)
    check_word(factors, "factors", ("normal", "signs", "ones"))
    std = check_number(std, "std", least=0)
    find, layers = select_layers(model, where)
    check_known(layers)
    if num_submembers > 1 and (factors == "ones" or (factors == "normal" and std == 0)):
        warn_alike()
    keys = member_keys(key, num_submembers, purpose="batch_ensemble")
    new = []
    for i, layer in enumerate(layers):
        sides = []
        for j, shape in enumerate((input_shape(layer), output_shape(layer))):
            own = jax.vmap(lambda key, n=2 * i + j: jax.random.fold_in(key, n))(keys)
            sides.append(draw_factors(own, shape, layer.weight.dtype, factors=factors, std=std))
        new.append(rank_one(layer, *sides))
    return JointEnsemble(eqx.tree_at(find, model, new), num_submembers)


def rank_one(layer: Any, in_factors: Array, out_factors: Array) -> RankOne:
    """Adds the factors of all sub-members `(submembers, ...)` to a layer, and a copy of its bias for each."""
    bias = None if layer.bias is None else jnp.broadcast_to(layer.bias, (len(in_factors), *layer.bias.shape))
    layer = eqx.tree_at(lambda x: x.bias, layer, None, is_leaf=lambda x: x is None)
    return RankOne(layer, in_factors, out_factors, bias)


def draw_factors(
    keys: Key[Array, " submembers"], shape: tuple[int, ...], dtype: Any, *, factors: str, std: float = 1.0
) -> Array:
    """Draws the factors of all sub-members."""
    if factors == "ones":
        return jnp.ones((len(keys), *shape), dtype)
    if factors == "signs":
        return jax.vmap(lambda key: jax.random.rademacher(key, shape, dtype))(keys)
    draw = lambda key: 1 + jnp.asarray(std, dtype) * jax.random.normal(key, shape, dtype)
    return jax.vmap(draw)(keys)


def tabm(
    model: M, num_submembers: int = 32, *, where: Select = None, factors: Literal["signs", "normal"] = "signs", key: Any
) -> JointEnsemble[M]:
    """Converts a model to TabM: rank-one factors, of which only the first are random, and a head per sub-member.

    The last layer becomes a separate, reinitialised layer for each sub-member. The authors use AdamW with a learning
    rate of 0.002 and a weight decay of 3e-4, and average probabilities, not logits.

    **Arguments:**

    - `where`: the layers to convert in order, ending with the head.
    - `factors`: of the first layer: `"signs"`, -1 or 1; or `"normal"` with mean 0, for feature embeddings.

    ```python
    joint = ee.methods.efficient.tabm(eqx.nn.MLP(10, 3, 64, 2, key=key), key=key)
    joint(jnp.ones(10)).shape  # (32, 3)
    ```

    ??? cite
        [Gorishniy et al. 2025](https://arxiv.org/abs/2410.24210)
    """
    num_submembers = check_model(model, num_submembers, key)
    check_word(factors, "factors", ("signs", "normal"))
    find, layers = select_layers(model, where, least=2)
    check_known(layers)
    keys = jax.vmap(jax.random.split)(member_keys(key, num_submembers, purpose="tabm"))
    ones = lambda layer, shape: jnp.ones((num_submembers, *shape), layer.weight.dtype)
    draw = jax.random.rademacher if factors == "signs" else jax.random.normal
    first, shape = layers[0], input_shape(layers[0])
    random = jax.vmap(lambda key: draw(key, shape, first.weight.dtype))(keys[:, 0])
    sides = [random, *(ones(layer, input_shape(layer)) for layer in layers[1:-1])]
    new: list[Any] = [
        rank_one(layer, side, ones(layer, output_shape(layer))) for layer, side in zip(layers[:-1], sides, strict=True)
    ]
    heads = eqx.filter_vmap(lambda key: redraw(layers[-1], key))(keys[:, 1])
    return JointEnsemble(eqx.tree_at(find, model, [*new, Own(heads)]), num_submembers)
