"""An optax optimiser of one member, and that of the leaves which members train together."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .._keys import tag
from .._leaves import is_key, standard_promotion
from .._pytree import PyTree


def is_function(optimiser: Any) -> bool:
    """Whether it makes the optimiser of a member from hyperparameters."""
    return not isinstance(optimiser, optax.GradientTransformation | optax.MultiSteps) and callable(optimiser)


def resolve(optimiser: Any, hyper: PyTree) -> optax.GradientTransformationExtraArgs:
    """The optimiser of one member."""
    if is_function(optimiser):
        if hyper is None:
            raise TypeError(
                "An optimiser that is a function of hyperparameters needs `hyper=`; got none.\n"
                "Without hyperparameters pass an optax optimiser, such as `optax.adam(1e-3)`."
            )
        optimiser = optimiser(jax.tree.map(_as_python_float, hyper))
    if isinstance(optimiser, optax.MultiSteps):
        optimiser = optimiser.gradient_transformation()
    if not isinstance(optimiser, optax.GradientTransformation):
        raise TypeError(f"The optimiser must be an optax optimiser, or return one; got `{type(optimiser).__name__}`.")
    return optax.with_extra_args_support(optimiser)


def _as_python_float(x: Any) -> Any:
    """A scalar, weakly typed like a Python float: updates keep the weights' dtype, regardless of that of `hyper`."""
    is_float = eqx.is_array(x) and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full_like(0.0, x) if is_float else x


def first_state(optimiser: Any, params: PyTree, hyper: PyTree, key: Any) -> PyTree:
    """The optimiser's first state of one member, with noise keys of its own; without a key, of what members share."""
    with standard_promotion():
        state = resolve(optimiser, hyper).init(params)
    state = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, int | float) else x, state)
    return state if key is None else jax.tree_util.tree_map_with_path(lambda path, x: _own_noise(path, x, key), state)


def _own_noise(path: tuple, x: Any, key: Any) -> Any:
    """The noise key of one member: optax would give all members the same noise."""
    if not is_noise(path, x):
        return x
    words = jax.random.key_data(jax.random.fold_in(key, tag("optimiser")))
    own = jax.random.fold_in(jax.random.fold_in(x, words[0]), words[1])
    return own if is_key(x) else jax.random.key_data(own)


def is_noise(path: tuple, x: Any) -> bool:
    """Whether a leaf of an optimiser's state is a key."""
    name = getattr(path[-1], "name", None) if path else None
    is_legacy = isinstance(x, jax.Array) and x.dtype == jnp.uint32 and x.shape[-1:] == (2,)
    return is_key(x) or (name in ("key", "rng_key") and is_legacy)


def update(
    optimiser: Any,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    value: Any,
    value_fn: Callable[[PyTree], Any] | None,
    hyper: PyTree,
) -> tuple[PyTree, PyTree]:
    """The weights and the optimiser's state after one step.

    Line searches, plateau schedules, Polyak steps and the like get extra arguments, by the names that optax uses.
    """
    own = resolve(optimiser, hyper)

    def value_at(params: PyTree, *, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        del obj_fn, grad_fn  # a line search passes on arguments that it does not know, and looks whether they are taken
        return value_fn(params)  # pyright: ignore[reportOptionalCall]

    extra = {"value": value, "grad": grads}
    if value_fn is not None:
        extra |= {
            "value_fn": value_at,
            "obj_fn": value_fn,
            "grad_fn": lambda params, _: eqx.filter_grad(value_fn)(params),
        }
    with standard_promotion():
        updates, new = own.update(grads, state, params, **only_supported(own.update, extra))
        params = optax.apply_updates(params, updates)
    # Weak types would change the type of the loop's carry.
    return params, jax.tree.map(
        lambda x, old: jnp.asarray(x, old.dtype) if eqx.is_array(old) and not is_key(old) else x, new, state
    )


def only_supported(update: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that an `update` accepts: most accept any, some (`optax.contrib.sam`) only their own."""
    accepted = inspect.signature(update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return extra
    return {name: x for name, x in extra.items() if name in accepted}
