import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._caller import caller
from ..._check import check_word
from ..._ensemble import Ensemble
from ..._keys import member_keys
from ..._map import is_per_member, view
from ..._marks import Each
from ..._pytree import PyTree
from ..._stack import stack
from .._layers import is_substitute, own_flags
from ._layers import AXIS, JoinInputs, RankOne

M = TypeVar("M")


class JointEnsemble(eqx.Module, Generic[M]):
    """Several sub-members that are trained jointly: ONE member of an [`eqx_ensemble.Ensemble`][].

    `stack([joint])` has one joint ensemble; `build(make, 5, key=key)` with a `make` that converts has five independent
    ones. Divergence of one sub-member affects all.

    **Attributes:** `model`, the converted model, with arrays `(submembers, ...)` and shared ones; `num_submembers`.

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    joint = ee.methods.efficient.batch_ensemble(model, 4, key=key)
    ee.predict(ee.stack([joint]), jnp.ones((10, 3))).shape  # (1, 10, 4, 1)
    ```
    """

    model: M
    num_submembers: int = eqx.field(static=True)

    def __call__(self, *args: Any, key: Any = None, **kwargs: Any) -> PyTree:
        """Calls every sub-member with one example: `(...)` in, `(submembers, ...)` out.

        An input marked [`eqx_ensemble.Each`][] has one value per sub-member. Each has its own key, derived from `key`,
        and state, `tree.stack([state] * joint.num_submembers)`; with `mimo` all share one.
        """
        if key is not None:
            kwargs["key"] = _submember_keys(self, key)
        call: Any = lambda model, args, kwargs: model(*args, **kwargs)
        return _map_submembers(call, self, args, kwargs)


def _has_one_pass(joint: JointEnsemble[Any]) -> bool:
    """Whether the sub-members share one forward pass."""
    nodes = jax.tree.leaves(joint.model, is_leaf=is_substitute)
    return any(isinstance(node, JoinInputs) for node in nodes)


def _submember_keys(joint: JointEnsemble[Any], key: Any) -> Any:
    """One key per sub-member, or the key itself if all share one forward pass."""
    if _has_one_pass(joint) or isinstance(key, Each):
        return key
    return Each(member_keys(key, joint.num_submembers, purpose="submember"))


def _map_submembers(fn: Callable[..., PyTree], joint: JointEnsemble[Any], *inputs: PyTree) -> PyTree:
    """Maps `fn(model, *inputs)` over the sub-members, with a named axis for layers that join them.

    Inputs are shared unless they are marked `Each`. States are per sub-member, or shared in a joint forward pass.
    """
    is_state = lambda x: isinstance(x, eqx.nn.State)
    has_one_state = _has_one_pass(joint)
    is_mapped = lambda x: isinstance(x, Each) or (is_state(x) and not has_one_state)
    own, shared = eqx.partition(joint.model, own_flags(joint.model))
    mapped, common = eqx.partition(inputs, jax.tree.map(is_mapped, inputs, is_leaf=is_per_member))

    def one(own: PyTree, mapped: PyTree, _: Array) -> PyTree:
        args = jax.tree.map(view, eqx.combine(mapped, common), is_leaf=is_per_member)
        return fn(eqx.combine(own, shared), *args)

    # Of `mimo`, no array has an axis of sub-members; and JAX compares the sizes of arrays, but not with `axis_size`.
    out = eqx.filter_vmap(one, axis_name=AXIS)(own, mapped, jnp.arange(joint.num_submembers))
    if not has_one_state:
        return out
    first = lambda x: jax.tree.map(lambda leaf: leaf[0], x) if is_state(x) else x
    return jax.tree.map(first, out, is_leaf=is_state)


def members(joint: JointEnsemble[M] | Ensemble[JointEnsemble[M]]) -> Ensemble[M]:
    """Extracts the sub-members as ordinary models that share no weights, of the original type.

    The result takes the memory of `num_submembers` full models. Sub-members of
    [`eqx_ensemble.methods.efficient.mimo`][] predict as if all got the same input.

    **Arguments:**

    - `joint`: a joint ensemble, or an ensemble of them, whose sub-members are then adjacent.

    ```python
    joint = ee.methods.efficient.batch_ensemble(eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    ee.methods.efficient.members(joint)[0]  # an ordinary eqx.nn.MLP
    ```
    """
    joints = joint.unstack() if isinstance(joint, Ensemble) else [joint]
    return stack([dense for each in joints for dense in _dense_models(each)])


def _dense_models(joint: JointEnsemble[M]) -> list[M]:
    """The sub-members as ordinary models."""
    own, shared = eqx.partition(joint.model, own_flags(joint.model))

    def model(i: int) -> M:
        one = eqx.combine(jax.tree.map(lambda x: x[i] if eqx.is_array(x) else x, own), shared)
        return jax.tree.map(lambda x: x.dense(i) if is_substitute(x) else x, one, is_leaf=is_substitute)

    return [model(i) for i in range(joint.num_submembers)]


def as_members(predictions: PyTree) -> PyTree:
    """Merges the axes of members and sub-members, for `combine`, `scores`, `uncertainty` and `combine=`.

    Each array `(members, rows, submembers, ...)`, from [`eqx_ensemble.predict`][], becomes `(members * submembers,
    rows, ...)`, the sub-members of one member adjacent.

    ```python
    make = lambda key: ee.methods.efficient.tabm(eqx.nn.MLP(3, 2, 16, 2, key=key), 8, key=key)
    predictions = ee.predict(ee.build(make, 2, key=key), jnp.ones((100, 3)))  # (2, 100, 8, 2)
    ee.methods.efficient.as_members(predictions).shape  # (16, 100, 2)
    ```
    """
    flat = lambda x: jnp.moveaxis(x, 2, 1).reshape((-1, x.shape[1], *x.shape[3:]))
    return jax.tree.map(flat, predictions)


def mean_loss(
    loss: Callable[..., Any],
    *,
    rows: Literal["same", "split", "shuffle"] = "same",
    repetitions: int = 1,
    same_inputs: float | int = 0.0,
) -> Callable[..., Any]:
    """Turns a loss for one model into the loss of a joint ensemble: the mean of the losses of its sub-members.

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` of one sub-member as for [`eqx_ensemble.fit`][], also with `state`,
        `hyper` and auxiliary outputs. States and auxiliary outputs have a leading `submembers` axis, except the state
        of `mimo`.
    - `rows`: `"same"`: all rows for each sub-member. `"split"`: one part each, as Masksembles. `"shuffle"`: all rows,
        in a different order for each, as `mimo` needs.
    - `repetitions`: with `"shuffle"`, how often each row occurs in a batch; the authors of MIMO use 4.
    - `same_inputs`: with `"shuffle"`, the fraction of rows for which all sub-members get the same inputs.

    ```python
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    joint = ee.methods.efficient.mimo(eqx.nn.MLP(3, 1, 16, 2, key=key), key=key)
    loss = ee.methods.efficient.mean_loss(loss, rows="shuffle", repetitions=4)
    ensemble, x = ee.stack([joint]), jnp.ones((64, 3))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), x, epochs=2, key=key)
    ```
    """
    check_word(rows, "rows", ("same", "split", "shuffle"))

    @functools.wraps(loss)
    def mean_of_losses(model: Any, *inputs: Any, **named: Any) -> Any:
        if rows == "same" and _has_one_pass(model) and model.num_submembers > 1:
            raise ValueError(
                f"`{caller()}` needs different rows for the sub-members of `mimo`: trained on the same inputs, they "
                "become identical.\nPass `rows='shuffle'`. For a score, call the model: `jax.vmap(model)(x)` is "
                "`(rows, submembers, ...)`."
            )
        *state, batch, key = inputs
        if rows != "same":
            num_rows = next(len(x) for x in jax.tree.leaves(batch) if eqx.is_array(x))
            chosen = _choose_rows(num_rows, model.num_submembers, key, rows, repetitions, same_inputs)
            batch = jax.tree.map(lambda x: Each(x[chosen]) if eqx.is_array(x) else x, batch)
        if key is not None:
            key = _submember_keys(model, key)
        own = lambda model, inputs, named: loss(model, *inputs, **named)
        out = _map_submembers(own, model, (*state, batch, key), named)
        return (jnp.mean(out[0]), *out[1:]) if isinstance(out, tuple) else jnp.mean(out)

    return mean_of_losses


def _choose_rows(
    num_rows: int, num_submembers: int, key: Any, rows: str, repetitions: int, same_inputs: float
) -> Array | np.ndarray:
    """The row indices of each sub-member `(submembers, n)`."""
    if rows == "split":
        size = -(-num_rows // num_submembers)
        return (np.arange(num_submembers * size) % num_rows).reshape(num_submembers, size)
    common, own = jax.random.split(jax.random.fold_in(key, _ORDER))
    order = jax.random.permutation(common, np.tile(np.arange(num_rows, dtype=np.int32), repetitions))
    size = round(len(order) * (1 - same_inputs))
    shuffle = lambda key: jnp.concatenate([jax.random.permutation(key, order[:size]), order[size:]])
    return jax.vmap(shuffle)(jax.random.split(own, num_submembers))


_ORDER = 0x6F72646  # separates the row order from the random numbers of the loss


def weight_labels(params: PyTree) -> PyTree:
    """Labels the factors of rank-one sub-members `"fast"`, all other weights `"slow"`, for `optax.multi_transform`.

    The authors of BatchEnsemble train factors with half the learning rate and without weight decay, which would shrink
    them towards 0.

    ```python
    optimiser = optax.multi_transform(
        {"fast": optax.adam(5e-4), "slow": optax.adamw(1e-3, weight_decay=1e-4)},
        ee.methods.efficient.weight_labels,
    )
    ```
    """

    def of_node(node: Any) -> Any:
        labels = jax.tree.map(lambda _: "slow", node)
        if isinstance(node, RankOne):
            fast = jax.tree.map(lambda _: "fast", (node.in_factors, node.out_factors))
            labels = RankOne(labels.layer, fast[0], fast[1], labels.bias)
        return labels

    return jax.tree.map(of_node, params, is_leaf=is_substitute)
