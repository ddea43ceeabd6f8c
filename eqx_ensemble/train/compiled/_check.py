import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..._check import kind_text, path_text
from .._check import MULTI_STEPS


def check_loss_signature(fn: Any, *, stateful: bool, hyper: Any, name: str) -> bool:
    """Raises unless the loss can be called as documented. Returns whether it takes `hyper`."""
    if not callable(fn):
        raise TypeError(f"`{name}` needs the loss of one member as a function `loss(model, batch, key)`, got {fn!r}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    wants_hyper = "hyper" in signature.parameters
    if wants_hyper and hyper is None:
        raise TypeError(f"`{name}`: the loss has a parameter `hyper`, but no `hyper=` was given.")
    wanted = ["model", "state", "batch", "key"] if stateful else ["model", "batch", "key"]
    try:
        signature.bind(*wanted, **({"hyper": None} if wants_hyper else {}))
    except TypeError as error:
        named = getattr(fn, "__name__", type(fn).__name__)
        hint = ""
        if next(iter(signature.parameters), None) == "state":
            hint = "\nA training step is called in a loop: `state, metrics = step(state, batch)`."
        elif not stateful and "state" in signature.parameters:
            hint = "\nPass the members' state that `build` returned, as `state=`."
        raise TypeError(
            f"`{name}` calls the loss of one member as `loss({', '.join(wanted)})`; `{named}{signature}` cannot be "
            f"called like that: {error}.{hint}"
        ) from None
    return wants_hyper


def check_loss_output(out: Any, *, stateful: bool, has_aux: bool) -> None:
    """Raises unless the loss returned a scalar, then the state and the auxiliary outputs if there are any."""
    parts = ["value"] + ["state"] * stateful + ["aux"] * has_aux
    wanted = f"`({', '.join(parts)})`" if len(parts) > 1 else "one scalar"
    if len(parts) > 1:
        if not isinstance(out, tuple) or len(out) != len(parts):
            raise TypeError(f"Training needs a loss that returns {wanted}, it returned {_output_text(out)}.")
        value = out[0]
        if stateful and not isinstance(out[1], eqx.nn.State):
            raise TypeError(
                f"Training needs a loss that returns {wanted}; its second output is {_output_text(out[1])}."
            )
    else:
        value = out
    if isinstance(value, tuple) and len(parts) == 1:
        raise TypeError(
            f"Training needs a loss that returns one scalar, it returned {_output_text(value)}.\n"
            "Set `has_aux=True` for auxiliary outputs after the value; pass `state=` for stateful members."
        )
    if value is None:
        raise TypeError(
            "Training needs a loss that is a floating-point scalar, it returned `None`: is a `return` missing?"
        )
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"Training needs a loss that is a floating-point scalar, it returned {_output_text(value)}.")
    if shape != ():
        raise ValueError(
            f"Training needs a loss that reduces over the batch to one scalar; it returned shape {shape}.\n"
            "Take the mean: `return jnp.mean(per_example)`."
        )
    if has_aux:
        for path, x in jax.tree_util.tree_flatten_with_path(out[-1])[0]:
            if getattr(x, "dtype", None) is None and not isinstance(x, bool | int | float | complex):
                where = jax.tree_util.keystr(path) or "(the value)"
                raise TypeError(f"Training needs auxiliary outputs that are arrays; at `{where}`: {_output_text(x)}.")


def _output_text(x: Any) -> str:
    if getattr(x, "shape", None) is not None and getattr(x, "dtype", None) is not None:
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, tuple):
        return f"({', '.join(_output_text(item) for item in x)})"
    return kind_text(x)


def concrete_hyper_message() -> str:
    """The message that a function of `hyper` uses its concrete value."""
    return (
        "The function that makes a member's optimiser uses the concrete value of a traced hyper-parameter. Optax does "
        "so with the length of a schedule.\n"
        "Rescale a schedule of fixed length: `sweep.rescale_schedule(optax.cosine_decay_schedule(lr, 1000), 1000, "
        "length)`; write other choices with `jax.numpy.where`."
    )


def check_made_optimiser(value: Any, *, name: str) -> None:
    """Raises unless a function of `hyper` returned an optimiser."""
    if not isinstance(value, optax.GradientTransformation):
        way = f"\n{MULTI_STEPS}" if isinstance(value, optax.MultiSteps) else ""
        raise TypeError(
            f"`{name}`: the optimiser function must return an optax optimiser, it returned {kind_text(value)}.{way}"
        )


def check_state_after(new: Any, old: Any, *, what: str) -> None:
    """Raises if a step changed the structure, the shapes or the dtypes of a state or of parameters."""
    before, after = jax.tree_util.tree_flatten_with_path(old)[0], jax.tree_util.tree_flatten_with_path(new)[0]
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            f"One training step changed the structure of the {what} from {jax.tree.structure(old)} to "
            f"{jax.tree.structure(new)}."
        )
    for (path, x), (_, y) in zip(before, after, strict=True):
        if jnp.shape(x) != jnp.shape(y) or jnp.result_type(x) != jnp.result_type(y):
            where = jax.tree_util.keystr(path) or "(the value)"
            raise TypeError(
                f"One training step changed the {what} at `{where}` from {_output_text(x)} to {_output_text(y)}."
            )


def check_same_outputs(first: Any, now: Any) -> None:
    """Raises unless auxiliary outputs `(members, ...)` have one shape in all steps, as the history needs."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(first)
    if jax.tree.structure(now) != structure:
        raise TypeError(f"The loss's auxiliary outputs changed from {structure} to {jax.tree.structure(now)}.")
    for (path, x), y in zip(keyed, jax.tree.leaves(now), strict=True):
        if x.shape != y.shape:
            raise ValueError(
                f"The loss's auxiliary output at `{path_text(path[1:])}` has shape {x.shape[1:]} for one batch and "
                f"{y.shape[1:]} for a smaller one; the history needs one shape.\n"
                "Reduce it over the batch, or choose a `batch_size` that divides the number of rows."
            )
