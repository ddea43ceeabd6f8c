import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._errors import MemberMismatchError
from ._leaves import array_leaves, describe, is_inside_transformation, kind_text


def no_transformation(*, name: str) -> None:
    """Training looks at values to decide what is done next: what is saved, who has stopped, when it ends."""
    if is_inside_transformation():
        raise TypeError(
            f"`{name}` cannot run inside `jax.jit`, `jax.vmap`, `jax.grad` or another transformation: it decides on "
            "the host what comes next. There, take the steps of `train.make_step`, in a `jax.lax.scan`, or write one "
            "member's whole training as a function for `map_members`."
        )


def loss_signature(fn: Any, *, stateful: bool, hyper: Any, name: str) -> bool:
    """The loss can be called as documented. Returns whether it takes `hyper`."""
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
        if not stateful and "state" in signature.parameters:
            hint = "\nPass the members' state that `build` returned, as `state=`."
        raise TypeError(
            f"`{name}` calls the loss of one member as `loss({', '.join(wanted)})`; `{named}{signature}` cannot be "
            f"called like that: {error}.{hint}"
        ) from None
    return wants_hyper


def optax_or_function(value: Any, *, name: str) -> None:
    """An optax optimiser, or a function."""
    if isinstance(value, optax.GradientTransformation):
        return
    if isinstance(value, optax.MultiSteps):
        raise TypeError(f"`{name}` needs an optax optimiser, got a MultiSteps.\n{_MULTI_STEPS}")
    if not callable(value):
        arrays = len(array_leaves(value))
        if arrays:
            raise TypeError(
                f"`{name}` needs an optax optimiser, got {kind_text(value)} of {arrays} arrays: an optimiser's state?\n"
                "Pass the optimiser itself, such as `optax.adam(1e-3)`; its state is made for every member."
            )
        raise TypeError(f"`{name}` needs an optax optimiser, got {describe(value)}.")


def optimiser(value: Any, *, hyper: Any, name: str) -> None:
    """An optax optimiser, or a function of one member's `hyper` that makes one."""
    optax_or_function(value, name=name)
    if isinstance(value, optax.GradientTransformation):
        return
    if hyper is None:
        named = getattr(value, "__name__", type(value).__name__)
        raise TypeError(
            f"`{name}` needs an optax optimiser, got the function `{named}`.\n"
            f"Call it first, for example `optax.adam(1e-3)`; or pass `hyper=` if `{named}` makes an optimiser from "
            "each member's hyper-parameters."
        )


_MULTI_STEPS = "Pass `optax.MultiSteps(...).gradient_transformation()`."

LOOKS_AT_HYPER = (
    "The function that makes a member's optimiser uses the concrete value of a traced hyper-parameter. Optax does so "
    "with the length of a schedule.\n"
    "Rescale a schedule of fixed length: `sweep.rescale_schedule(optax.cosine_decay_schedule(lr, 1000), 1000, "
    "length)`; write other choices with `jax.numpy.where`."
)


def made_optimiser(value: Any, *, name: str) -> None:
    """What a function of `hyper` returned is an optimiser."""
    if not isinstance(value, optax.GradientTransformation):
        way = f"\n{_MULTI_STEPS}" if isinstance(value, optax.MultiSteps) else ""
        raise TypeError(
            f"`{name}`: the optimiser function must return an optax optimiser, it returned {kind_text(value)}.{way}"
        )


def used_hyper(optimiser: Any, *, wants_hyper: bool, name: str) -> None:
    """Hyper-parameters reach the optimiser or the loss."""
    if isinstance(optimiser, optax.GradientTransformation) and not wants_hyper:
        raise TypeError(
            f"`{name}` was given `hyper`, but nothing uses it.\n"
            "Pass the optimiser as a function, `lambda h: optax.adam(h['lr'])`, or name a loss parameter `hyper`."
        )


TABLE_COLUMNS = ("member", "loss", "validation", "best_step", "status", "stopped_at")
"""The columns of a run's table beside those of its hyper-parameters."""


def hyper_column(path: tuple) -> str:
    """The column of a hyper-parameter in a run's table."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "hyper"


def hyper(values: Any, num_members: int, *, name: str) -> None:
    """Every hyper-parameter has one value per member."""
    leaves = array_leaves(values)
    if not leaves:
        raise TypeError(f"`{name}` needs `hyper` to hold arrays with one value per member, got {values!r}.")
    for path, x in leaves:
        if x.ndim == 0 or x.shape[0] != num_members:
            raise MemberMismatchError(
                f"`{name}` needs one value per member in `hyper`; at `{path}`: expected ({num_members}, ...), "
                f"got {x.shape}."
            )
    columns = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(values):
        column = hyper_column(path)
        if column in TABLE_COLUMNS or column in columns:
            other = f"`hyper{jax.tree_util.keystr(columns[column])}`" if column in columns else "what a run reports"
            raise ValueError(
                f"`{name}` needs names in `hyper` that are columns of their own in `run.table()`; "
                f"`hyper{jax.tree_util.keystr(path)}` would be the column `{column}`, which is that of {other}.\n"
                "Name it differently."
            )
        columns[column] = path


def check_model_state(state: Any, num_members: int, *, name: str) -> None:
    """The stacked state of stateful members."""
    if state is None:
        return
    if not isinstance(state, eqx.nn.State):
        raise TypeError(
            f"`{name}` needs `state` to be the stacked `equinox.nn.State` that `build` returned beside the ensemble, "
            f"got {kind_text(state)}."
        )
    for path, x in array_leaves(state):
        if x.ndim == 0 or x.shape[0] != num_members:
            raise MemberMismatchError(
                f"`{name}` needs a state with one value per member; at `{path}`: expected ({num_members}, ...), "
                f"got {x.shape}.\nIndex the state as the ensemble: `eqx_ensemble.tree.take(state, index)`."
            )


def check_model_state_given(stacked: Any, state: Any, *, name: str) -> None:
    """A model that holds state is trained with it."""
    if state is not None:
        return
    indices = [x for x in jax.tree.leaves(stacked, is_leaf=_is_state_index) if _is_state_index(x)]
    if indices:
        raise TypeError(
            f"`{name}`: the members are stateful (for example they contain BatchNorm), but no `state` was given.\n"
            "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`."
        )


def _is_state_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)


def loss_output(out: Any, *, stateful: bool, has_aux: bool) -> None:
    """The shapes that the loss returns: a scalar, then the state and the auxiliary outputs if there are any."""
    parts = ["value"] + ["state"] * stateful + ["aux"] * has_aux
    wanted = f"`({', '.join(parts)})`" if len(parts) > 1 else "one scalar"
    if len(parts) > 1:
        if not isinstance(out, tuple) or len(out) != len(parts):
            raise TypeError(f"Training needs a loss that returns {wanted}, it returned {_described(out)}.")
        value = out[0]
        if stateful and not isinstance(out[1], eqx.nn.State):
            raise TypeError(f"Training needs a loss that returns {wanted}; its second output is {_described(out[1])}.")
    else:
        value = out
    if isinstance(value, tuple) and len(parts) == 1:
        raise TypeError(
            f"Training needs a loss that returns one scalar, it returned {_described(value)}.\n"
            "Set `has_aux=True` for auxiliary outputs beside the value; pass `state=` for stateful members."
        )
    if value is None:
        raise TypeError(
            "Training needs a loss that is a floating-point scalar, it returned `None`: is a `return` missing?"
        )
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"Training needs a loss that is a floating-point scalar, it returned {_described(value)}.")
    if shape != ():
        raise ValueError(
            f"Training needs a loss that reduces over the batch to one scalar; it returned shape {shape}.\n"
            "Take the mean: `return jnp.mean(per_example)`."
        )
    if has_aux:
        for path, x in jax.tree_util.tree_flatten_with_path(out[-1])[0]:
            if getattr(x, "dtype", None) is None and not isinstance(x, bool | int | float | complex):
                where = jax.tree_util.keystr(path) or "(the value)"
                raise TypeError(f"Training needs auxiliary outputs that are arrays; at `{where}`: {_described(x)}.")


def _described(x: Any) -> str:
    if getattr(x, "shape", None) is not None and getattr(x, "dtype", None) is not None:
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, tuple):
        return f"({', '.join(_described(item) for item in x)})"
    return kind_text(x)


def same_choice(first: list[bool], last: list[bool], leaves: Any, *, name: str) -> None:
    """The same leaves are trained in all members."""
    if first == last:
        return
    keyed = jax.tree_util.tree_leaves_with_path(leaves)
    where = next(path for (path, _), a, b in zip(keyed, first, last, strict=True) if a != b)
    raise ValueError(
        f"`{name}` trains the same leaves in all members; `trainable` does not choose alike in the first and in the "
        f"last of them at `{jax.tree_util.keystr(where)}`.\nLet it go by type, shape and dtype, not by values."
    )


@contextlib.contextmanager
def explain_trainable(*, name: str) -> Iterator[None]:
    """Adds to an error in the choice of what is trained how that choice is made."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"`{name}` calls `trainable` with each leaf of one member, or takes a tree of booleans like one member, "
            "as `equinox.partition` does.\nTo train a part of a model: "
            "`eqx.tree_at(lambda m: m.part, jax.tree.map(lambda _: False, ensemble[0]), replace=True)`."
        )
        raise


def trainable_choice(value: Any, *, name: str) -> None:
    """A function of a leaf, or booleans and functions in a tree."""
    for leaf in [None] if value is None else jax.tree.leaves(value):
        if not isinstance(leaf, bool | np.bool_) and not callable(leaf):
            raise TypeError(
                f"`{name}` needs `trainable` to be a function of a leaf, or a tree of booleans, got "
                f"{kind_text(leaf)}.\n"
                "For example `lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2`."
            )


def trainable(params: Any, *, name: str) -> None:
    """There is something to train, and nothing integer in it."""
    leaves = array_leaves(params)
    if not leaves:
        raise ValueError(
            f"`{name}` found nothing to train: no stacked floating-point array is selected by `trainable`.\n"
            "Shared leaves are constants in training."
        )
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"`{name}` can train floating-point arrays only; `trainable` selects `{path}` of dtype {x.dtype}."
            )


def state_after(new: Any, old: Any, *, what: str) -> None:
    """A step leaves the shapes and dtypes of what it changes alone."""
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
                f"One training step changed the {what} at `{where}` from {_described(x)} to {_described(y)}."
            )


def train_state(value: Any, kind: type) -> None:
    """A training state, in the first place."""
    if not isinstance(value, kind):
        raise TypeError(
            "A training step is called as `state, metrics = step(state, batch)` with the state that `train.init` "
            f"made; got {kind_text(value)} as `state`."
        )
