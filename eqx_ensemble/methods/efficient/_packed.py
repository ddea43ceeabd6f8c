import math
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import _keys
from ..._check import check_number, check_positive_int
from ._check import check_chain, check_known, check_model
from ._convert import Select, replace_layers, select_layers
from ._joint import JointEnsemble
from ._layers import AbstractJointLayer, Own, input_shape, output_shape, redraw, with_weights

M = TypeVar("M")


def packed_ensemble(
    model: M, num_submembers: int, *, alpha: float | int = 2.0, gamma: int = 1, where: Select = None, key: Any
) -> JointEnsemble[M]:
    r"""Converts a model to a packed ensemble: narrow sub-members that together are about as large as the model.

    A hidden width $n$ of the model becomes $\lceil \alpha n / k \rceil$ in each of $k$ sub-members, rounded up to a
    multiple of $\gamma$, so all hidden layers together have about $\alpha^2 / (k \gamma)$ of the model's weights. With
    $\gamma > 1$ hidden layers have $\gamma$ groups, like grouped convolutions; the first and the last layer do not. All
    weights are reinitialised and none are shared. Unless an optimiser combines all gradients, for example in a global
    norm, sub-members are trained like those of [`eqx_ensemble.build`][] with narrow models.

    **Arguments:**

    - `model`: the model of ONE member: a chain of linear layers and convolutions, each taking the output of the
        previous one, without other weights. For models with normalisation layers or attention, build an ensemble of
        narrow models instead.
    - `num_submembers`: $k$, the number of sub-members.
    - `alpha`: $\alpha$, above 0; the authors recommend 2.
    - `gamma`: $\gamma$, the number of groups in each sub-member.
    - `where`: the layers of the chain in order; by default all linear layers and convolutions in the order of the
        model's fields.
    - `key`: the root key. Unlike with other methods, sub-members depend on `num_submembers`, which determines their
        widths.

    **Returns:** [`eqx_ensemble.methods.efficient.JointEnsemble`][]. The gradient of
    [`eqx_ensemble.methods.efficient.mean_loss`][] is $1/k$ of that of models trained alone: multiply their learning
    rates by $k$, except for optimisers that normalise gradients, such as Adam.

    **Raises:** `TypeError` or `ValueError` as [`eqx_ensemble.methods.efficient.batch_ensemble`][], for fewer than two
    layers, layers that are not a chain, weights outside them, convolutions with groups, and `alpha` or `gamma` that are
    not positive.

    ```python
    model = eqx.nn.MLP(10, 3, 64, 2, key=key)
    joint = ee.methods.efficient.packed_ensemble(model, 4, key=key)
    joint.model.layers[1].layer.weight.shape  # (4, 32, 32): as many weights as (64, 64)
    ```

    ??? cite

        Laurent, Lafage, Tartaglione, Daniel, Martinez, Bursuc and Franchi, *Packed-Ensembles for Efficient
        Uncertainty Estimation*, ICLR 2023, arXiv:2210.09184.
    """
    name = "methods.efficient.packed_ensemble"
    num_submembers = check_model(model, num_submembers, key, name=name)
    alpha, gamma = _check_sizes(alpha, gamma, name=name)
    find, layers = select_layers(model, where, least=2, name=name)
    check_known(layers, name=name)
    check_chain(layers, model, name=name)
    keys = _keys.member_keys(key, num_submembers, purpose="packed_ensemble")
    new, before, narrow, last = [], 1, 1, len(layers) - 1
    for i, layer in enumerate(layers):
        into, out = (math.prod(shape(layer)) for shape in (input_shape, output_shape))
        width = gamma * math.ceil(alpha * out / (num_submembers * gamma) - 1e-9)
        sizes = {"in_size": None if i == 0 else into // before * narrow, "out_size": None if i == last else width}
        groups = 1 if i in (0, last) else gamma
        own = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys)
        new.append(_make_layers(layer, own, groups, sizes))
        before, narrow = out, width
    return JointEnsemble(replace_layers(model, find, new), num_submembers)


def _check_sizes(alpha: Any, gamma: Any, *, name: str) -> tuple[float, int]:
    """Raises unless both are positive. Returns them."""
    alpha = check_number(alpha, "alpha", name=name, least=0)
    if alpha == 0:
        raise ValueError(f"`{name}` needs `alpha` above 0, got 0: sub-members would have no hidden features.")
    return alpha, check_positive_int(gamma, "gamma", name=name)


def _make_layers(layer: Any, keys: Any, groups: int, sizes: dict[str, Any]) -> AbstractJointLayer:
    """Draws the layers of all sub-members."""
    if groups == 1 or isinstance(layer, eqx.nn.Conv):
        return Own(eqx.filter_vmap(lambda key: redraw(layer, key, groups=groups, **sizes))(keys))
    return eqx.filter_vmap(lambda key: _draw_groups(layer, key, groups, **sizes))(keys)


def _draw_groups(layer: eqx.nn.Linear, key: Any, groups: int, *, in_size: int, out_size: int) -> "GroupedLinear":
    one = lambda key: redraw(layer, key, in_size=in_size // groups, out_size=out_size // groups)
    parts = eqx.filter_vmap(one)(jax.random.split(key, groups))
    return GroupedLinear(parts.weight, None if parts.bias is None else parts.bias.reshape(-1))


class GroupedLinear(AbstractJointLayer):
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
