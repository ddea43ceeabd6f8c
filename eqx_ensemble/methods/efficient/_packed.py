import math
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._caller import caller
from ..._check import check_number, check_positive_int
from ..._keys import member_keys
from .._layers import (
    AbstractSubstitute,
    Select,
    check_groups,
    check_known,
    input_shape,
    output_shape,
    select_layers,
    with_weights,
)
from ._convert import check_chain, check_model
from ._joint import JoinInputs, JointEnsemble, SelectOutput
from ._layers import Own, redraw

M = TypeVar("M")


def mimo(model: M, num_submembers: int = 3, *, where: Select = None, key: Any) -> JointEnsemble[M]:
    """Converts a model to MIMO: one network with several inputs and outputs; a sub-member is one pair of them.

    The first layer takes the concatenated inputs, the last returns all outputs; both are reinitialised. Train
    sub-members on different rows, `mean_loss(loss, rows="shuffle")`; in prediction all get the same input. The authors
    use three, and sum the loss over heads: scale their learning rates, except of Adam and its like, by
    their number.

    **Arguments:**

    - `where`: selects the first and the last layer.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.mimo(model, 3, key=key)
    joint(jnp.ones(10)).shape  # (3, 3): one input for all sub-members
    joint(ee.Each(jnp.ones((3, 10)))).shape  # (3, 3): one for each
    ```

    ??? cite
        [Havasi et al. 2021](https://arxiv.org/abs/2010.06610)
    """
    num_submembers = check_model(model, num_submembers, key)
    find, layers = select_layers(model, where, least=2)
    first, last = layers[0], layers[-1]
    check_known([first, last])
    for layer in (first, last):
        check_groups(layer)
    first_key, last_key = jax.random.split(member_keys(key, 1, purpose="mimo")[0])
    size = lambda shape: shape[0] if shape else "scalar"
    count = lambda shape: num_submembers * (shape[0] if shape else 1)
    inputs, outputs = input_shape(first), output_shape(last)
    joined = redraw(first, first_key, in_size=count(inputs))
    parted = redraw(last, last_key, out_size=count(outputs))
    new = [JoinInputs(joined, num_submembers, size(inputs)), SelectOutput(parted, num_submembers, size(outputs))]
    ends = lambda tree: [find(tree)[0], find(tree)[-1]]
    return JointEnsemble(eqx.tree_at(ends, model, new), num_submembers)


def packed_ensemble(
    model: M, num_submembers: int, *, alpha: float | int = 2.0, gamma: int = 1, where: Select = None, key: Any
) -> JointEnsemble[M]:
    r"""Converts a model to a packed ensemble: narrow sub-members that together are about as large as the model.

    A hidden width $n$ becomes about $\alpha n / k$ in each of $k$ sub-members: hidden layers together have about
    $\alpha^2 / (k \gamma)$ of the model's weights. All weights are reinitialised and none are shared. Gradients of the
    mean loss are $1/k$ of those of models trained alone: scale learning rates, except of Adam and its like.

    **Arguments:**

    - `model`: a chain of linear layers and convolutions, without other weights. For other models build an ensemble of
        narrow models.
    - `num_submembers`: $k$, which also determines the initial weights.
    - `alpha`: $\alpha$, above 0; the authors recommend 2.
    - `gamma`: $\gamma$, the number of groups in hidden layers.

    **Raises:** `ValueError` for layers that are not a chain, and weights outside them.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.packed_ensemble(model, 4, key=key)
    joint.model.layers[1].layer.weight.shape  # (4, 32, 32): as many weights as (64, 64)
    ```

    ??? cite
        [Laurent et al. 2023](https://arxiv.org/abs/2210.09184)
    """
    num_submembers = check_model(model, num_submembers, key)
    alpha, gamma = check_sizes(alpha, gamma)
    find, layers = select_layers(model, where, least=2)
    check_known(layers)
    check_chain(layers, model)
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


def check_sizes(alpha: Any, gamma: Any) -> tuple[float, int]:
    """Raises unless both are positive. Returns them."""
    alpha = check_number(alpha, "alpha", least=0)
    if alpha == 0:
        raise ValueError(f"`{caller()}` needs `alpha` above 0, got 0: sub-members would have no hidden features.")
    return alpha, check_positive_int(gamma, "gamma")


def _make_layers(layer: Any, keys: Any, groups: int, sizes: dict[str, Any]) -> AbstractSubstitute:
    """Draws the layers of all sub-members."""
    if groups == 1 or isinstance(layer, eqx.nn.Conv):
        return Own(eqx.filter_vmap(lambda key: redraw(layer, key, groups=groups, **sizes))(keys))
    return eqx.filter_vmap(lambda key: _draw_groups(layer, key, groups, **sizes))(keys)


def _draw_groups(layer: eqx.nn.Linear, key: Any, groups: int, *, in_size: int, out_size: int) -> "GroupedLinear":
    one = lambda key: redraw(layer, key, in_size=in_size // groups, out_size=out_size // groups)
    parts = eqx.filter_vmap(one)(jax.random.split(key, groups))
    return GroupedLinear(parts.weight, None if parts.bias is None else parts.bias.reshape(-1))


class GroupedLinear(AbstractSubstitute):
    """A grouped linear layer, with a block-diagonal weight."""

    own: ClassVar[tuple[str, ...]] = ("weight", "bias")
    weight: Any
    bias: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The concatenated outputs of all groups."""
        y = jnp.einsum("goi,gi->go", self.weight, x.reshape((self.weight.shape[0], -1))).reshape(-1)
        return y if self.bias is None else y + self.bias

    def dense(self, index: int) -> Any:
        """The layer with the full block-diagonal weight."""
        weight = jax.scipy.linalg.block_diag(*self.weight)
        use_bias = self.bias is not None
        layer = eqx.nn.Linear(weight.shape[1], weight.shape[0], use_bias, weight.dtype, key=jax.random.key(0))
        return with_weights(layer, weight, self.bias)
