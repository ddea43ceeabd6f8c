import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from ... import _axes, tree
from ..._caller import caller
from ..._check import check_function, check_key, check_number, check_positive_int, check_word, is_member_array
from ..._ensemble import Ensemble, stack
from ..._jaxpr import warn_of_two_batch_axes
from ..._pytree import PyTree
from ..._warnings import ignore_warnings
from .._layers import is_substitute
from ._convert import check_joint, check_predictions
from ._joint import JointEnsemble, Submembers, has_one_pass, map_submembers, submember_keys
from ._layers import RankOne


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

    return jax.tree.map(of_node, params, is_leaf=is_substitute)


M = TypeVar("M")


@overload
def members(joint: Ensemble[JointEnsemble[M]]) -> Ensemble[M]: ...
@overload
def members(joint: JointEnsemble[M]) -> Ensemble[M]: ...
def members(joint: JointEnsemble[M] | Ensemble[JointEnsemble[M]]) -> Ensemble[M]:
    """Extracts the sub-members as ordinary models that share no weights, of the original type.

    The result takes the memory of `num_submembers` full models. Sub-members of
    [`eqx_ensemble.methods.efficient.mimo`][] predict as if all got the same input.

    **Arguments:**

    - `joint`: a joint ensemble, or an ensemble of them. Sub-member $i$ of $k$ in the member with id $j$ gets the id
        $j k + i$.

    ```python
    joint = ee.methods.efficient.batch_ensemble(eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    ee.methods.efficient.members(joint)[0]  # an ordinary eqx.nn.MLP
    ```
    """
    if not isinstance(joint, Ensemble):
        check_joint(joint)
        return _stack(dense_models(joint))
    models = joint.unstack()
    for model in models:
        check_joint(model)
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
    dense = lambda node, i: node.dense(i) if is_substitute(node) else node
    return [jax.tree.map(lambda x, i=i: dense(x, i), m, is_leaf=is_substitute) for i, m in enumerate(models)]


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
    check_predictions(predictions)
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
    check_function(loss, "loss", example="lambda model, batch, key: ...")
    check_word(rows, "rows", ("same", "split", "shuffle"))
    repetitions = check_positive_int(repetitions, "repetitions")
    same_inputs = check_number(same_inputs, "same_inputs", least=0, most=1)
    if rows != "shuffle" and (repetitions, same_inputs) != (1, 0.0):
        raise ValueError(f"`{caller()}` needs `rows='shuffle'` for `repetitions` and `same_inputs`, got {rows!r}.")

    @functools.wraps(loss)
    def mean_of_losses(model: Any, *inputs: Any, **named: Any) -> Any:
        check_joint(model)
        if rows == "same" and has_one_pass(model) and model.num_submembers > 1:
            raise ValueError(
                f"`{caller()}` needs different rows for the sub-members of `mimo`: trained on the same inputs, they "
                "become identical.\nPass `rows='shuffle'`. For a score, call the model: `jax.vmap(model)(x)` is "
                "`(rows, submembers, ...)`."
            )
        if len(inputs) < 2:
            raise TypeError(
                f"`{caller()}` makes a loss that takes its arguments by position, as `fit` passes them: expected "
                f"`(model, batch, key)`, got {len(inputs) + 1} by position.\nPass `None` for a key that it does not "
                "use."
            )
        *state, batch, key = inputs
        _warn_of_one(loss, model, state, batch, key, named)
        if rows != "same":
            found = [(path, x) for path, x in jtu.tree_leaves_with_path(batch) if is_member_array(x)]
            sizes = {x.shape[:1] for _, x in found}
            if len(sizes) != 1 or sizes == {()} or sizes == {(0,)}:
                listed = ", ".join(f"`batch{jtu.keystr(path)}` {x.shape}" for path, x in found) or "no array"
                raise ValueError(
                    f"`{caller()}` needs a batch of arrays `(rows, ...)` with at least one row, got {listed}."
                )
            num_rows = sizes.pop()[0]
            if rows == "shuffle":
                check_key(key)
            chosen = _choose_rows(num_rows, model.num_submembers, key, rows, repetitions, same_inputs)
            batch = jax.tree.map(lambda x: _axes.Each(x[chosen]) if is_member_array(x) else x, batch)
        if key is not None:
            key = submember_keys(model, key)
        own = lambda model, inputs, named: loss(model, *inputs, **named)
        out = map_submembers(own, model, (*state, batch, key), named)
        return (jnp.mean(out[0]), *out[1:]) if isinstance(out, tuple) else jnp.mean(out)

    return mean_of_losses


def _warn_of_one(loss: Any, joint: Any, state: list[Any], batch: Any, key: Any, named: dict[str, Any]) -> None:
    """Gives the warning of `fit` for a loss that turns one batch axis into two, which `fit` cannot detect here."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_member_array(x) else x
    first = (lambda x: x) if has_one_pass(joint) else (lambda x: x[0])
    model, own = eqx.filter_eval_shape(lambda: (dense_models(joint)[0], jax.tree.map(first, state)))
    warn_of_two_batch_axes(loss, *jax.tree.map(shape, ((model, *own, batch, key), named)))


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
