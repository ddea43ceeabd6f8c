from typing import Any

import jax

from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ._joint import is_joint_layer
from ._layers import RankOne


def weight_labels(params: PyTree) -> PyTree:
    """Labels the factors of rank-one sub-members `"fast"`, and all other weights `"slow"`.

    Use it with `optax.multi_transform` or, compared with a label, as a mask for optax. The authors of BatchEnsemble
    train the factors with half the learning rate and no weight decay, which would shrink the factors, and with them the
    weights, towards 0.

    **Arguments:**

    - `params`: a [`eqx_ensemble.methods.efficient.JointEnsemble`][], or its trained leaves, which optax passes to a
        label function.

    **Returns:** a tree of strings with the structure of `params`.

    **Raises:** `TypeError` for an [`eqx_ensemble.Ensemble`][].

    ```python
    optimiser = optax.multi_transform(
        {"fast": optax.adam(5e-4), "slow": optax.adamw(1e-3, weight_decay=1e-4)},
        ee.methods.efficient.weight_labels,
    )
    ```
    """
    if isinstance(params, Ensemble):
        raise TypeError(
            "`methods.efficient.weight_labels` labels the weights of one joint ensemble, got an `Ensemble`.\n"
            "Pass the function itself to `optax.multi_transform`, or an `ensemble[0]`."
        )

    def of_node(node: Any) -> Any:
        labels = jax.tree.map(lambda _: "slow", node)
        if isinstance(node, RankOne):
            fast = jax.tree.map(lambda _: "fast", (node.in_factors, node.out_factors))
            labels = RankOne(labels.layer, fast[0], fast[1], labels.bias)
        return labels

    return jax.tree.map(of_node, params, is_leaf=is_joint_layer)
