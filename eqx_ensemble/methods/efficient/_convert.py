import math
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from ..._caller import caller
from ..._check import check_word
from ..._keys import member_keys
from ..._warnings import warn
from .._layers import AbstractSubstitute, Select, check_groups, check_known, input_shape, output_shape, select_layers
from ._joint import JointEnsemble
from ._layers import GroupedLinear, JoinInputs, MaskInputs, Own, RankOne, SelectOutput, redraw

M = TypeVar("M")


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
    sub-member. $W$ and the first biases come from the model, which may be trained already. Train factors as in
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
    check_word(factors, "factors", ("normal", "signs", "ones"))
    find, layers = _select(model, where)
    if num_submembers > 1 and (factors == "ones" or (factors == "normal" and std == 0)):
        warn(
            f"`{caller()}`: all factors are 1, so sub-members that see the same rows have the same gradients and stay "
            "alike. Train them with `mean_loss(loss, rows='split')`, or draw the factors."
        )
    keys = member_keys(key, num_submembers, purpose="batch_ensemble")
    new = []
    for i, layer in enumerate(layers):
        sides = []
        for j, shape in enumerate((input_shape(layer), output_shape(layer))):
            own = jax.vmap(lambda key, n=2 * i + j: jax.random.fold_in(key, n))(keys)
            sides.append(_draw_factors(own, shape, layer.weight.dtype, factors=factors, std=std))
        new.append(_rank_one(layer, *sides))
    return JointEnsemble(eqx.tree_at(find, model, new), num_submembers)


def _select(model: Any, where: Select, *, least: int = 1) -> tuple[Any, list[Any]]:
    """A function that finds the layers to convert, and these layers."""
    find, layers = select_layers(model, where, least=least)
    check_known(layers)
    return find, layers


def _rank_one(layer: Any, in_factors: Array, out_factors: Array) -> RankOne:
    """Adds the factors of all sub-members `(submembers, ...)` to a layer, and a copy of its bias for each."""
    bias = None if layer.bias is None else jnp.broadcast_to(layer.bias, (len(in_factors), *layer.bias.shape))
    layer = eqx.tree_at(lambda x: x.bias, layer, None, is_leaf=lambda x: x is None)
    return RankOne(layer, in_factors, out_factors, bias)


def _draw_factors(
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
    check_word(factors, "factors", ("signs", "normal"))
    find, layers = _select(model, where, least=2)
    keys = jax.vmap(jax.random.split)(member_keys(key, num_submembers, purpose="tabm"))
    ones = lambda layer, shape: jnp.ones((num_submembers, *shape), layer.weight.dtype)
    draw = jax.random.rademacher if factors == "signs" else jax.random.normal
    first, shape = layers[0], input_shape(layers[0])
    random = jax.vmap(lambda key: draw(key, shape, first.weight.dtype))(keys[:, 0])
    sides = [random, *(ones(layer, input_shape(layer)) for layer in layers[1:-1])]
    new: list[Any] = [
        _rank_one(layer, side, ones(layer, output_shape(layer))) for layer, side in zip(layers[:-1], sides, strict=True)
    ]
    heads = eqx.filter_vmap(lambda key: redraw(layers[-1], key))(keys[:, 1])
    return JointEnsemble(eqx.tree_at(find, model, [*new, Own(heads)]), num_submembers)


def mimo(model: M, num_submembers: int = 3, *, where: Select = None, key: Any) -> JointEnsemble[M]:
    """Converts a model to MIMO: one network with several inputs and outputs; a sub-member is one pair of them.

    The first layer takes the concatenated inputs, the last returns all outputs; both are reinitialised. Train
    sub-members on different rows, `mean_loss(loss, rows="shuffle")`; in prediction all get the same input. The authors
    use three, and sum the loss over heads: scale their learning rates, except of Adam and its like, by
    their number.

    **Arguments:**

    - `where`: selects the first and the last layer, which have no groups.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.mimo(model, 3, key=key)
    joint(jnp.ones(10)).shape  # (3, 3): one input for all sub-members
    joint(ee.Each(jnp.ones((3, 10)))).shape  # (3, 3): one for each
    ```

    ??? cite
        [Havasi et al. 2021](https://arxiv.org/abs/2010.06610)
    """
    find, layers = _select(model, where, least=2)
    first, last = layers[0], layers[-1]
    check_groups(first)
    check_groups(last)
    first_key, last_key = jax.random.split(member_keys(key, 1, purpose="mimo")[0])
    size = lambda shape: shape[0] if shape else "scalar"
    count = lambda shape: num_submembers * (shape[0] if shape else 1)
    inputs, outputs = input_shape(first), output_shape(last)
    joined = redraw(first, first_key, in_size=count(inputs))
    parted = redraw(last, last_key, out_size=count(outputs))
    new = [JoinInputs(joined, num_submembers, size(inputs)), SelectOutput(parted, num_submembers, size(outputs))]
    ends = lambda tree: [find(tree)[0], find(tree)[-1]]
    return JointEnsemble(eqx.tree_at(ends, model, new), num_submembers)


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
    first = 1 if where is None else 0
    find, layers = _select(model, where, least=first + 1)
    root = member_keys(key, 1, purpose="masksembles")[0]
    new = []
    for i, layer in enumerate(layers[first:]):
        shape = input_shape(layer)
        masks = _draw_masks(jax.random.fold_in(root, i), num_submembers, math.prod(shape), scale)
        new.append(MaskInputs(layer, masks.reshape((num_submembers, *shape))))
    return JointEnsemble(eqx.tree_at(lambda tree: find(tree)[first:], model, new), num_submembers)


def _draw_masks(key: Key[Array, ""], num_masks: int, width: int, scale: float) -> Bool[Array, "masks width"]:
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


def packed_ensemble(
    model: M, num_submembers: int, *, alpha: float | int = 2.0, gamma: int = 1, where: Select = None, key: Any
) -> JointEnsemble[M]:
    r"""Converts a model to a packed ensemble: narrow sub-members that together are about as large as the model.

    A hidden width $n$ becomes about $\alpha n / k$ in each of $k$ sub-members: hidden layers together have about
    $\alpha^2 / (k \gamma)$ of the model's weights. All weights are reinitialised and none are shared. Gradients of the
    mean loss are $1/k$ of those of models trained alone: scale learning rates, except of Adam and its like.

    **Arguments:**

    - `model`: a chain of linear layers and convolutions without groups, and without other weights. For other models
        build an ensemble of narrow models.
    - `num_submembers`: $k$, which also determines the initial weights.
    - `alpha`: $\alpha$, above 0; the authors recommend 2.
    - `gamma`: $\gamma$, the number of groups in hidden layers.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.packed_ensemble(model, 4, key=key)
    joint.model.layers[1].layer.weight.shape  # (4, 32, 32): as many weights as (64, 64)
    ```

    ??? cite
        [Laurent et al. 2023](https://arxiv.org/abs/2210.09184)
    """
    find, layers = _select(model, where, least=2)
    for layer in layers:
        check_groups(layer)
    keys = member_keys(key, num_submembers, purpose="packed_ensemble")
    new, before, narrow, last = [], 1, 1, len(layers) - 1
    for i, layer in enumerate(layers):
        into, out = (math.prod(shape(layer)) for shape in (input_shape, output_shape))
        width = gamma * math.ceil(alpha * out / (num_submembers * gamma) - 1e-9)
        sizes = {"in_size": None if i == 0 else into // before * narrow, "out_size": None if i == last else width}
        groups = 1 if i in (0, last) else gamma
        own = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys)
        new.append(_make_layers(layer, own, groups, sizes))
        before, narrow = out, width
    return JointEnsemble(eqx.tree_at(find, model, new), num_submembers)


def _make_layers(layer: Any, keys: Any, groups: int, sizes: dict[str, Any]) -> AbstractSubstitute:
    """Draws the layers of all sub-members."""
    if groups == 1 or isinstance(layer, eqx.nn.Conv):
        return Own(eqx.filter_vmap(lambda key: redraw(layer, key, groups=groups, **sizes))(keys))
    return eqx.filter_vmap(lambda key: _draw_groups(layer, key, groups, **sizes))(keys)


def _draw_groups(layer: eqx.nn.Linear, key: Any, groups: int, *, in_size: int, out_size: int) -> "GroupedLinear":
    one = lambda key: redraw(layer, key, in_size=in_size // groups, out_size=out_size // groups)
    parts = eqx.filter_vmap(one)(jax.random.split(key, groups))
    return GroupedLinear(parts.weight, None if parts.bias is None else parts.bias.reshape(-1))
