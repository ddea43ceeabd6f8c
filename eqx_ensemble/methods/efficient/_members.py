from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp

from ... import tree
from ..._ensemble import Ensemble, stack
from ..._pytree import PyTree
from ..._warnings import ignore_warnings
from ._check import check_joint, check_predictions
from ._joint import JointEnsemble, Submembers, is_joint_layer

M = TypeVar("M")


@overload
def members(joint: Ensemble[JointEnsemble[M]]) -> Ensemble[M]: ...
@overload
def members(joint: JointEnsemble[M]) -> Ensemble[M]: ...
def members(joint: JointEnsemble[M] | Ensemble[JointEnsemble[M]]) -> Ensemble[M]:
    """Extracts the sub-members as ordinary models that share no weights: an ensemble for all functions of this library.

    Rank-one factors are multiplied into the weights, weights of masked features are set to zero, and packed layers are
    separated. Sub-members of [`eqx_ensemble.methods.efficient.mimo`][] predict as if all got the same input. The result
    takes the memory of `num_submembers` full models, and further training no longer shares weights.

    **Arguments:**

    - `joint`: a joint ensemble, or an ensemble of them.

    **Returns:** an [`eqx_ensemble.Ensemble`][] of models of the original type. In an ensemble of joint ensembles,
    sub-member $i$ of $k$ in the member with id $j$ gets the id $j k + i$.

    **Raises:** `TypeError` for anything else.

    ```python
    joint = ee.methods.efficient.batch_ensemble(eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    ensemble = ee.methods.efficient.members(joint)
    ensemble[0]  # an ordinary eqx.nn.MLP
    ```
    """
    name = "methods.efficient.members"
    if not isinstance(joint, Ensemble):
        check_joint(joint, name=name)
        return _stack(dense_models(joint))
    models = joint.unstack()
    for model in models:
        check_joint(model, name=name)
    size = models[0].num_submembers
    ids = joint.ids[:, None] * size + jnp.arange(size, dtype=joint.ids.dtype)[None]
    return _stack([dense for model in models for dense in dense_models(model)], ids=ids.reshape(-1))


def _stack(models: list[M], *, ids: Any = None) -> Ensemble[M]:
    with ignore_warnings("`stack` got identical models"):  # sub-members may begin as equals
        return stack(models, ids=ids)


def dense_models(joint: JointEnsemble[M]) -> list[M]:
    """The sub-members as ordinary models."""
    parts = Submembers(joint)
    models = [parts.one(tree.take(parts.per_member(), i)) for i in range(joint.num_submembers)]
    dense = lambda node, i: node.dense(i) if is_joint_layer(node) else node
    return [jax.tree.map(lambda x, i=i: dense(x, i), m, is_leaf=is_joint_layer) for i, m in enumerate(models)]


def as_members(predictions: PyTree) -> PyTree:
    """Merges the axes of members and sub-members in predictions of an ensemble of joint ensembles.

    Use it for `combine`, `scores` and `uncertainty`, which take a leading `members` axis, and inside `combine=`.

    **Arguments:**

    - `predictions`: a PyTree of arrays `(members, rows, submembers, ...)`, as [`eqx_ensemble.predict`][] returns them.

    **Returns:** the predictions as arrays `(members * submembers, rows, ...)`. The sub-members of one member are
    adjacent, in the order of [`eqx_ensemble.methods.efficient.members`][].

    **Raises:** `ValueError` for arrays of fewer than three axes.

    ```python
    make = lambda key: ee.methods.efficient.tabm(eqx.nn.MLP(3, 2, 16, 2, key=key), 8, key=key)
    ensemble, x = ee.build(make, 2, key=key), jnp.ones((100, 3))
    as_members = ee.methods.efficient.as_members
    logits = as_members(ee.predict(ensemble, x))  # (2, 100, 8, 2) becomes (16, 100, 2)
    combine = lambda logits: ee.combine.mixture(as_members(logits))
    ee.predict(ensemble, x, combine=combine).shape  # (100, 2)
    ```
    """
    check_predictions(predictions, name="methods.efficient.as_members")
    flat = lambda x: jnp.moveaxis(x, 2, 1).reshape((-1, x.shape[1], *x.shape[3:]))
    return jax.tree.map(flat, predictions)
