from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ... import _keys
from ..._check import check_word
from ._batch_ensemble import rank_one
from ._check import check_known, check_model
from ._convert import Select, replace_layers, select_layers
from ._joint import JointEnsemble
from ._layers import Own, input_shape, output_shape, redraw

M = TypeVar("M")


def tabm(
    model: M,
    num_submembers: int = 32,
    *,
    where: Select = None,
    factors: Literal["signs", "normal"] = "signs",
    key: Any,
) -> JointEnsemble[M]:
    """Converts a model to TabM: rank-one factors, of which only the first are random, and a head per sub-member.

    It is [`eqx_ensemble.methods.efficient.batch_ensemble`][] with a different initialisation. The input factors of the
    first layer are random, all others are 1, and biases are those of the model: up to the heads, sub-members initially
    differ only by a random weighting of the features. The last layer becomes a separate, reinitialised layer for each
    sub-member.

    The authors train with AdamW at a learning rate of 0.002 and a weight decay of 3e-4, use early stopping on the score
    of the mean prediction, and average probabilities, not logits, over sub-members.

    **Arguments:**

    - `model`: the model of ONE member.
    - `num_submembers`: the number of sub-members; 32 as in the paper.
    - `where`: the layers to convert in order, ending with the head; by default all linear layers and convolutions in
        the order of the model's fields.
    - `factors`: the initialisation of the factors of the first layer: `"signs"`, -1 or 1; or `"normal"` with mean 0 and
        standard deviation 1, which the authors prefer after feature embeddings. They share one factor per embedding;
        here every feature has its own.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.efficient.JointEnsemble`][].

    **Raises:** `TypeError` or `ValueError` as [`eqx_ensemble.methods.efficient.batch_ensemble`][], and for fewer than
    two layers.

    ```python
    joint = ee.methods.efficient.tabm(eqx.nn.MLP(10, 3, 64, 2, key=key), key=key)
    joint(jnp.ones(10)).shape  # (32, 3)
    ```

    ??? cite

        Gorishniy, Kotelnikov and Babenko, *TabM: Advancing Tabular Deep Learning with Parameter-Efficient
        Ensembling*, ICLR 2025, arXiv:2410.24210.
    """
    name = "methods.efficient.tabm"
    num_submembers = check_model(model, num_submembers, key, name=name)
    check_word(factors, "factors", ("signs", "normal"), name=name)
    find, layers = select_layers(model, where, least=2, name=name)
    check_known(layers, name=name)
    keys = jax.vmap(jax.random.split)(_keys.member_keys(key, num_submembers, purpose="tabm"))
    ones = lambda layer, shape: jnp.ones((num_submembers, *shape), layer.weight.dtype)
    draw = jax.random.rademacher if factors == "signs" else jax.random.normal
    first, shape = layers[0], input_shape(layers[0])
    random = jax.vmap(lambda key: draw(key, shape, first.weight.dtype))(keys[:, 0])
    sides = [random, *(ones(layer, input_shape(layer)) for layer in layers[1:-1])]
    new: list[Any] = [
        rank_one(layer, side, ones(layer, output_shape(layer))) for layer, side in zip(layers[:-1], sides, strict=True)
    ]
    heads = eqx.filter_vmap(lambda key: redraw(layers[-1], key))(keys[:, 1])
    return JointEnsemble(replace_layers(model, find, [*new, Own(heads)]), num_submembers)
