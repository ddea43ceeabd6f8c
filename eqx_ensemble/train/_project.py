from collections.abc import Callable
from typing import Any

import jax
import optax

from .._pytree import PyTree
from ._optimiser import only_supported


def project(optimiser: optax.GradientTransformation, fn: Callable[[Any], Any]) -> optax.GradientTransformationExtraArgs:
    """Projects the weights after every update of an optimiser: projected gradient descent.

    Such as weights in a range, or orthogonal ones. Every member is projected alone. A projected weight is exact up to
    one rounding; a weight of zero is exact.

    **Arguments:**

    - `optimiser`: the optimiser of one member.
    - `fn`: `fn(params) -> params` of one member. Its weights are those that are trained, with `None` elsewhere, as by
        `equinox.filter(model, trainable)`.

    **Returns:** an optax optimiser.

    ```python
    def non_negative(model):
        return eqx.tree_at(lambda model: model.weight, model, replace_fn=jax.nn.relu)

    optimiser = ee.train.project(optax.sgd(0.1), non_negative)  # fit(ensemble, loss, optimiser, ...)
    ```

    ??? cite

        Goldstein, "Convex Programming in Hilbert Space" (Bulletin of the American Mathematical Society, 1964).
    """
    inner = optax.with_extra_args_support(optimiser)

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("`train.project` needs the weights: call `update(grads, state, params)` with them.")
        updates, state = inner.update(updates, state, params, **only_supported(inner.update, extra))
        after = optax.apply_updates(params, updates)
        return jax.tree.map(_change, fn(after), params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _change(new: Any, old: Any) -> Any:
    if new.shape != old.shape:  # which would be broadcast
        raise ValueError(f"`train.project` needs `fn` to keep the shape {old.shape} of a leaf, got {new.shape}.")
    return new - old
