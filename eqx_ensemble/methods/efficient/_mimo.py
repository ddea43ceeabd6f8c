from typing import Any, TypeVar

import jax

from ... import _keys
from ._check import check_groups, check_known, check_model
from ._convert import Select, replace_layers, select_layers
from ._joint import JoinInputs, JointEnsemble, SelectOutput
from ._layers import input_shape, output_shape, redraw

M = TypeVar("M")


def mimo(model: M, num_submembers: int = 3, *, where: Select = None, key: Any) -> JointEnsemble[M]:
    """Converts a model to MIMO: one network with several inputs and outputs; a sub-member is one input with its output.

    The first layer takes the concatenated inputs of all sub-members, the last returns all outputs; both are
    reinitialised. The layers between are computed once, so a prediction costs little more than that of the model.

    Sub-members are trained on different rows, `mean_loss(loss, rows="shuffle")`, and become independent subnetworks as
    far as the capacity of the network allows. In prediction all get the same input. Since they share one forward pass,
    they share its random key and its state.

    **Arguments:**

    - `model`: the model of ONE member. Its capacity is divided between sub-members: it needs more than one task
        requires.
    - `num_submembers`: the number of inputs and outputs; 3 as in the paper.
    - `where`: selects the first and the last layer; by default the first and the last linear layer or convolution in
        the order of the model's fields. If it selects more than two layers, the first and the last are used.
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.efficient.JointEnsemble`][]. The authors sum the loss over heads, whereas
    [`eqx_ensemble.methods.efficient.mean_loss`][] is the mean: multiply their learning rates by the number of
    sub-members, except for optimisers that normalise gradients, such as Adam.

    **Raises:** `TypeError` or `ValueError` as [`eqx_ensemble.methods.efficient.batch_ensemble`][], for fewer than two
    layers, and for a first or last convolution with groups.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.mimo(model, 3, key=key)
    joint(jnp.ones(10)).shape  # (3, 3): one input for all sub-members
    joint(ee.Each(jnp.ones((3, 10)))).shape  # (3, 3): one for each
    ```

    ??? cite

        Havasi, Jenatton, Fort, Liu, Snoek, Lakshminarayanan, Dai and Tran, *Training independent subnetworks for
        robust prediction*, ICLR 2021, arXiv:2010.06610.
    """
    name = "methods.efficient.mimo"
    num_submembers = check_model(model, num_submembers, key, name=name)
    find, layers = select_layers(model, where, least=2, name=name)
    first, last = layers[0], layers[-1]
    check_known([first, last], name=name)
    for layer in (first, last):
        check_groups(layer, name=name)
    first_key, last_key = jax.random.split(_keys.member_keys(key, 1, purpose="mimo")[0])
    size = lambda shape: shape[0] if shape else "scalar"
    count = lambda shape: num_submembers * (shape[0] if shape else 1)
    inputs, outputs = input_shape(first), output_shape(last)
    joined = redraw(first, first_key, in_size=count(inputs))
    parted = redraw(last, last_key, out_size=count(outputs))
    new = [JoinInputs(joined, num_submembers, size(inputs)), SelectOutput(parted, num_submembers, size(outputs))]
    ends = lambda tree: [find(tree)[0], find(tree)[-1]]
    return JointEnsemble(replace_layers(model, ends, new), num_submembers)
