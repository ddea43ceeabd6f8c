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
    """Makes the loss of a joint ensemble of a loss that is written for one model: the mean of the sub-members' losses.

    Each sub-member has a loss of its own, and thus learns the task by itself. The loss of the mean prediction is
    lower by the ambiguity, the mean squared distance of the sub-members from their mean for squared errors; training
    on it lets sub-members make up for each other, and TabM's authors find it worse.

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` as for [`eqx_ensemble.fit`][], also with `state`, `hyper` and
        auxiliary outputs. `model` is one sub-member, called as the model that was converted. States and auxiliary
        outputs get a leading `submembers` axis; the state of [`eqx_ensemble.methods.efficient.mimo`][] is one.
    - `rows`: which rows of a batch the sub-members see.

        `"same"`: all rows, as for TabM; whatever the sub-members differ by must be in their weights.
        `"split"`: each its own part, as Masksembles is trained. Where the rows cannot be divided, such as in the last
        batch of an epoch, the first rows are seen by two sub-members, so that all parts are of one size.
        `"shuffle"`: all rows, each sub-member in an order of its own. For `mimo`, where sub-members meet in one
        forward pass, this pairs different rows; for others it changes nothing but dropout.

    - `repetitions`: with `"shuffle"`, how often every row occurs in a batch (`batch_repetitions` of MIMO's authors,
        who use 4).
    - `same_inputs`: with `"shuffle"`, the fraction of rows for which all sub-members see the same inputs, from 0 to 1
        (`input_repetition_probability` of the authors).

    **Returns:** a loss for `fit`, with the signature of `loss`. Random keys differ between sub-members.

    **Raises:** `TypeError` or `ValueError` for invalid options; when it is called, for a model that is no
    [`eqx_ensemble.methods.efficient.JointEnsemble`][], and for `mimo` with the same rows.

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
    """The warning of `fit` that a loss makes two batch axes of one, which it cannot see behind the sub-members."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_member_array(x) else x
    first = (lambda x: x) if has_one_pass(joint) else (lambda x: x[0])
    model, own = eqx.filter_eval_shape(lambda: (dense_models(joint)[0], jax.tree.map(first, state)))
    warn_of_two_batch_axes(loss, *jax.tree.map(shape, ((model, *own, batch, key), named)))


def _choose_rows(
    num_rows: int, num_submembers: int, key: Any, rows: str, repetitions: int, same_inputs: float
) -> Array | np.ndarray:
    """The rows of each sub-member `(submembers, n)`."""
    if rows == "split":
        size = -(-num_rows // num_submembers)
        return (np.arange(num_submembers * size) % num_rows).reshape(num_submembers, size)
    common, own = jax.random.split(jax.random.fold_in(key, _ORDER))
    order = jax.random.permutation(common, np.tile(np.arange(num_rows, dtype=np.int32), repetitions))
    size = round(len(order) * (1 - same_inputs))
    shuffle = lambda key: jnp.concatenate([jax.random.permutation(key, order[:size]), order[size:]])
    return jax.vmap(shuffle)(jax.random.split(own, num_submembers))


_ORDER = 0x6F72646  # keeps the order of rows apart from what the loss draws
