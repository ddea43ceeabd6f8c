import functools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import _axes
from ..._check import check_function, check_key, check_number, check_positive_int, check_word, is_member_array
from ..._jaxpr import warn_of_two_batch_axes
from ._check import check_batch, check_call, check_joint, check_rows_differ
from ._joint import has_one_pass, map_submembers, submember_keys
from ._members import dense_models

_NAME = "methods.efficient.mean_loss"


def mean_loss(
    loss: Callable[..., Any],
    *,
    rows: Literal["same", "split", "shuffle"] = "same",
    repetitions: int = 1,
    same_inputs: float | int = 0.0,
) -> Callable[..., Any]:
    """Turns a loss for one model into the loss of a joint ensemble: the mean of the losses of its sub-members.

    Each sub-member thus learns the task individually. The loss of the mean prediction is lower by the ambiguity: for
    squared errors, the mean squared distance of the sub-members from their mean. Training on it lets sub-members
    compensate for each other, which the authors of TabM find worse.

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` as for [`eqx_ensemble.fit`][], also with `state`, `hyper` and auxiliary
        outputs. `model` is one sub-member, with the call signature of the original model. States and auxiliary outputs
        have a leading `submembers` axis, except the state of [`eqx_ensemble.methods.efficient.mimo`][].
    - `rows`: the rows of a batch on which each sub-member is trained.

        - `"same"`: all rows, as for TabM; sub-members differ only by their weights.
        - `"split"`: one part each, as for Masksembles. If the rows do not divide evenly, as in the last batch of an
            epoch, the first rows are repeated, so that all parts have the same size.
        - `"shuffle"`: all rows, in a different order for each sub-member. For `mimo`, whose sub-members share one
            forward pass, this pairs different rows; for other methods it only affects dropout.

    - `repetitions`: with `"shuffle"`, the number of times that each row occurs in a batch (`batch_repetitions` of the
        authors of MIMO, who use 4).
    - `same_inputs`: with `"shuffle"`, the fraction of rows for which all sub-members get the same inputs, from 0 to 1
        (`input_repetition_probability` of the authors).

    **Returns:** a loss for `fit`, with the signature of `loss`. Sub-members get different random keys, except those of
    `mimo`.

    **Raises:** `TypeError` or `ValueError` for invalid options; when called, `TypeError` for a model that is not a
    [`eqx_ensemble.methods.efficient.JointEnsemble`][], and `ValueError` for `mimo` with `rows="same"`.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    joint = ee.methods.efficient.mimo(eqx.nn.MLP(3, 1, 16, 2, key=key), key=key)
    loss = ee.methods.efficient.mean_loss(mse, rows="shuffle", repetitions=4)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    run = ee.fit(ee.stack([joint]), loss, optax.adam(1e-3), data, epochs=2, key=key)
    ```
    """
    check_function(loss, "loss", name=_NAME, example="lambda model, batch, key: ...")
    check_word(rows, "rows", ("same", "split", "shuffle"), name=_NAME)
    repetitions = check_positive_int(repetitions, "repetitions", name=_NAME)
    same_inputs = check_number(same_inputs, "same_inputs", name=_NAME, least=0, most=1)
    if rows != "shuffle" and (repetitions, same_inputs) != (1, 0.0):
        raise ValueError(f"`{_NAME}` needs `rows='shuffle'` for `repetitions` and `same_inputs`, got {rows!r}.")

    @functools.wraps(loss)
    def mean_of_losses(model: Any, *inputs: Any, **named: Any) -> Any:
        check_joint(model, name=_NAME)
        check_rows_differ(model, rows, name=_NAME)
        check_call(inputs, name=_NAME)
        *state, batch, key = inputs
        _warn_of_one(loss, model, state, batch, key, named)
        if rows != "same":
            num_rows = check_batch(batch, name=_NAME)
            if rows == "shuffle":
                check_key(key, name=_NAME)
            chosen = _choose_rows(num_rows, model.num_submembers, key, rows, repetitions, same_inputs)
            batch = jax.tree.map(lambda x: _axes.Each(x[chosen]) if is_member_array(x) else x, batch)
        if key is not None:
            key = submember_keys(model, key)
        own = lambda model, inputs, named: loss(model, *inputs, **named)
        out = map_submembers(own, model, (*state, batch, key), named, name=_NAME)
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
