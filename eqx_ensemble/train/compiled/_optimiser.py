import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ... import _keys
from ..._caller import caller
from ..._check import is_key, kind_text
from ..._promotion import standard_promotion
from ..._pytree import PyTree
from .._check import MULTI_STEPS
from .._together import Together, TogetherState, split_tied
from ._check import check_state_after, concrete_hyper_message, explain_optimiser

Optimiser = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation] | Together
"""An optax optimiser, a function that makes one from a member's hyper-parameters, or both for two kinds of leaves."""


def init_member(optimiser: Optimiser, params: PyTree, hyper: PyTree, member_id: Int[Array, ""] | None) -> PyTree:
    """The optimiser's first state for one member; without an id, for what members share."""
    if isinstance(optimiser, Together):
        own, shared = split_tied(params, optimiser.tied)
        first = init_member(optimiser.optimiser, own, hyper, member_id)
        return TogetherState(first, init_member(optimiser.shared, shared, None, None))
    transformation = resolve(optimiser, hyper)
    with standard_promotion(), explain_optimiser("in the optimiser's `init`", transformation.init, hyper):
        state = transformation.init(params)
    # optax starts some counters weakly typed (lbfgs); a step returns them strongly typed and would compile twice.
    state = jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.result_type(x)) if _is_number(x) else x, state)
    if member_id is None:
        return state
    return jax.tree_util.tree_map_with_path(lambda path, x: _own_noise(path, x, member_id), state)


def update_member(
    optimiser: Optimiser,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    value: Float[Array, ""],
    value_fn: Callable[[PyTree], Float[Array, ""]],
    hyper: PyTree,
    *,
    mean_value: Float[Array, ""] | None = None,
) -> tuple[PyTree, PyTree]:
    """The parameters and the optimiser's state of one member after one step.

    `mean_value` is the loss that the optimiser of shared parameters gets.

    Line searches, plateau schedules, Polyak steps and the like get extra arguments, by the names that optax uses.
    """
    if isinstance(optimiser, Together):
        (own, shared), (own_grads, shared_grads) = (split_tied(tree, optimiser.tied) for tree in (params, grads))
        value_of_own = lambda own: value_fn(eqx.combine(own, shared))
        new, state = update_member(optimiser.optimiser, own, opt_state.own, own_grads, value, value_of_own, hyper)
        value = value if mean_value is None else mean_value
        new_shared, shared_state = update_member(
            optimiser.shared, shared, opt_state.shared, shared_grads, value, _refuse, None
        )
        return eqx.combine(new, new_shared), TogetherState(state, shared_state)

    def value_at(params: PyTree, *, obj_fn: Any = None, grad_fn: Any = None) -> Float[Array, ""]:
        del obj_fn, grad_fn  # a line search forwards unknown arguments, and rejects those not accepted here
        return value_fn(params)

    def grad_at(params: PyTree, _: Any) -> PyTree:
        return jax.grad(value_fn)(params)

    transformation = optax.with_extra_args_support(resolve(optimiser, hyper))
    extra = {"value": value, "grad": grads, "value_fn": value_at, "obj_fn": value_fn, "grad_fn": grad_at}
    with standard_promotion(), explain_optimiser("in the optimiser's `update`", transformation.update, hyper):
        updates, new_state = transformation.update(
            grads, opt_state, params, **supported_arguments(transformation.update, extra)
        )
        new_params = optax.apply_updates(params, updates)
    check_state_after(new_state, opt_state, what="optimiser's state")
    check_state_after(new_params, params, what="parameters")
    return new_params, jax.tree.map(_strip_weak_type, new_state, opt_state)


def _refuse(_: PyTree) -> Any:
    raise TypeError("`train.Together` needs an optimiser of `shared` that does not evaluate the loss.")


def update_alone(optimiser: Optimiser, params: PyTree, opt_state: PyTree, value: Any, hyper: PyTree) -> PyTree:
    """The optimiser's `update` without a loss, for analysis; the loss that a line search evaluates is arbitrary."""
    some_loss = lambda params: jnp.asarray(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(params)), value.dtype)
    return update_member(optimiser, params, opt_state, params, value, some_loss, hyper)


def supported_arguments(update: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that an `update` accepts: most accept any, some (`optax.contrib.sam`) only their own."""
    parameters = inspect.signature(update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}


def resolve(optimiser: Any, hyper: PyTree) -> optax.GradientTransformation:
    """The optimiser of one member."""
    if isinstance(optimiser, optax.GradientTransformation):
        return optimiser
    try:
        with explain_optimiser("where the optimiser is made of `hyper`", optimiser, hyper):
            made = optimiser(jax.tree.map(_as_python_float, hyper))
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(concrete_hyper_message()) from error
    if not isinstance(made, optax.GradientTransformation):
        way = f"\n{MULTI_STEPS}" if isinstance(made, optax.MultiSteps) else ""
        raise TypeError(
            f"`{caller()}`: the optimiser function must return an optax optimiser, it returned {kind_text(made)}.{way}"
        )
    return made


def _as_python_float(x: Any) -> Any:
    """A scalar, weakly typed like a Python float: updates keep the weights' dtype, regardless of that of `hyper`."""
    is_float = eqx.is_array(x) and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full_like(0.0, x) if is_float else x  # weakly typed, like `0.0`


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | int | float) and not is_key(x)


def _strip_weak_type(new: Any, old: Any) -> Any:
    if _is_number(new) and jnp.result_type(new) == jnp.result_type(old):
        return jnp.asarray(new, dtype=jnp.result_type(old))
    return new


def _own_noise(path: tuple, x: Any, member_id: Int[Array, ""]) -> Any:
    """Noise keys in an optimiser's state become the member's own; otherwise all members would draw the same noise."""
    if not _is_noise(path, x):
        return x
    own = jax.random.fold_in(jax.random.fold_in(x, _keys.tag("optimiser")), member_id)
    return own if is_key(x) else jax.random.key_data(own)


def keep_noise(state: PyTree, own: PyTree) -> PyTree:
    """An optimiser's state with the noise keys of another one of the same structure."""
    choose = lambda path, x, mine: mine if _is_noise(path, x) else x
    return jax.tree_util.tree_map_with_path(choose, state, own)


def _is_noise(path: tuple, x: Any) -> bool:
    if is_key(x):
        return True
    name = getattr(path[-1], "name", None) if path else None
    return name in ("key", "rng_key") and isinstance(x, jax.Array) and x.dtype == jnp.uint32 and x.shape[-1:] == (2,)
