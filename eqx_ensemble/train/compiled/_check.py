import contextlib
import difflib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._axes import UNBOUND_AXIS
from ..._caller import caller
from ..._check import is_member_array, kind_text, path_text
from ..._leaf_text import leaf_text
from ..._pytree import PyTree

# Notes on errors inside a user's functions: where they were called, with which arguments, and the likely cause.

_MOST_SHAPES = 8
_ONE_FOR_MANY = "rank should be at least 1, but is only 0"
_INTEGERS = re.compile(r"dtype.*integer|integer.* type|integer labels", re.IGNORECASE | re.DOTALL)
_KEY_WORDS = re.compile("key|rng|seed|^[kr]$|^_|^argument ")
_NUMBERS = re.compile("rate|step_size|decay|momentum|scale|clip|norm$")


@contextlib.contextmanager
def explain_loss(fn: Callable[..., Any], arguments: tuple[Any, ...], hyper: PyTree, *, purpose: str) -> Iterator[None]:
    """Adds a note to an error inside a loss or a score: where it was called, with which arguments, the likely cause.

    `arguments` are those of one member: its model, its state if it has one, its batch and its key. `hyper` is `None`
    if the function does not take it.
    """
    try:
        yield
    except Exception as error:
        parameters = _parameters_of(fn, len(arguments))
        named = [*zip(parameters, arguments, strict=True), *([] if hyper is None else [("hyper", hyper)])]
        called = f"`{caller()}` called `{_name_of(fn)}` ({_where(fn)}) {purpose}, for one member with"
        cause = _cause(error, parameters, arguments, hyper)
        lines = [called, *(f"  {parameter}: {_short(value)}" for parameter, value in named), cause]
        error.add_note("\n".join(filter(None, lines)))
        raise


@contextlib.contextmanager
def explain_optimiser(part: str, fn: Callable[..., Any], hyper: PyTree) -> Iterator[None]:
    """Adds a note to an error inside an optimiser: which part of it ran, and the member's hyper-parameters."""
    try:
        yield
    except Exception as error:
        given = "" if hyper is None else f" with `hyper` {_short(hyper)}"
        lines = [f"This happened {part}, for one member{given}.", _missing_hyper(error, hyper)]
        strings = _strings_in(fn)
        if strings:
            lines.append(f"It holds the string {strings[0]} where optax expects a number: is a learning rate quoted?")
        error.add_note("\n".join(filter(None, lines)))
        raise


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _where(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    return "a callable object" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _parameters_of(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first positional parameters."""
    named = [*inspect.signature(fn).parameters.values()] if _has_signature(fn) else []
    words = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*words, *(f"argument {i}" for i in range(len(words), count))][:count]


def _has_signature(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    """A model as its type, everything else as the shapes of its arrays."""
    if isinstance(value, eqx.Module | eqx.nn.State):
        return type(value).__name__
    if len(jax.tree.leaves(value)) > _MOST_SHAPES:
        return f"{kind_text(value)} of {len(jax.tree.leaves(value))} leaves"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_member_array(x) else x, value)
    return " ".join(eqx.tree_pformat(shapes, width=10**6, struct_as_array=True).split())


def _cause(error: Exception, parameters: list[str], arguments: tuple[Any, ...], hyper: PyTree) -> str | None:
    model, *state, batch, _ = arguments
    leaves = [x for x in jax.tree.leaves(batch) if is_member_array(x)]
    batch_name, key_name = parameters[-2:]
    if len(leaves) > 1 and not _KEY_WORDS.search(key_name):
        before = "model, state" if state else "model"
        return (
            f"A loss is called as `loss({before}, batch, key)`: `{batch_name}` is the whole batch and `{key_name}` the "
            f"random key. Take the batch apart inside: `x, y = batch`."
        )
    call = _model_call(error, model)
    if call is not None:
        kind, given = call
        whole = [x for x in given if _is_whole_batch(x, leaves)]
        if whole:
            how = "jax.vmap(model)(x)"
            if state:
                how = 'jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)'
            batch = leaf_text(whole[0])
            return f"`{kind}` was called with {batch}, a whole batch. If it takes one example, write `{how}`."
    return _known_cause(error, leaves, hyper) or _model_shapes(call)


def _known_cause(error: Exception, leaves: list[Any], hyper: PyTree) -> str | None:
    """The causes that JAX's messages identify."""
    text = str(error)
    no_labels = [x for x in reversed(leaves) if not jnp.issubdtype(x.dtype, jnp.integer)]
    # Prefers the dtype that the error names, then the fewest axes, then the last leaf.
    no_labels.sort(key=lambda x: (x.dtype.name not in text, x.ndim))
    if no_labels and _INTEGERS.search(text):
        labels = no_labels[0]
        kind, fix = ("class", "y.astype(int)") if labels.ndim < 2 else ("one-hot", "y.argmax(axis=-1)")
        return f"If `{leaf_text(labels)}` holds {kind} labels, make them integers: `fit(..., (x, {fix}), ...)`."
    if _ONE_FOR_MANY in text:
        return (
            "`key` is one key for the whole batch. For one per example: "
            "`jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(key, len(x)))`."
        )
    if unbound := UNBOUND_AXIS.search(text):
        return (
            f"A layer needs the batch's axis by name: `jax.vmap(model, axis_name={unbound[1]!r}, in_axes=(0, None), "
            "out_axes=(0, None))(x, state)`."
        )
    return _missing_hyper(error, hyper)


def _missing_hyper(error: Exception, hyper: PyTree) -> str | None:
    if not isinstance(error, KeyError) or not isinstance(hyper, Mapping) or error.args[:1] == ():
        return None
    missing = error.args[0]
    if missing in list(hyper):
        return None
    close = difflib.get_close_matches(str(missing), [str(name) for name in hyper], n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"`hyper` has no {missing!r}; it has {', '.join(map(repr, hyper))}.{guess}"


def _model_call(error: Exception, model: Any) -> tuple[str, list[Any]] | None:
    """The outermost call of a method of the model in the traceback: its class and its array arguments."""
    kinds = {type(x) for x in _modules_in(model)}
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        code = frame.f_code
        words = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if words[:1] == ("self",) and type(frame.f_locals.get("self")) in kinds:
            given = [frame.f_locals.get(word) for word in words[1:]]
            # A state that was used cannot be flattened.
            given = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, eqx.nn.State))
            return type(frame.f_locals["self"]).__name__, [x for x in given if isinstance(x, jax.Array)]
    return None


def _modules_in(tree: PyTree) -> Iterator[eqx.Module]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, eqx.Module):
            yield node
        inner = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node and isinstance(x, eqx.Module))
        stack += [x for x in inner if isinstance(x, eqx.Module) and x is not node]


def _is_whole_batch(x: Any, leaves: list[Any]) -> bool:
    """Whether an argument is a leaf of the batch, or has the shape of one and not that of an example."""
    if any(x is leaf for leaf in leaves):
        return True
    an_example = {leaf.shape[1:] for leaf in leaves}
    return x.ndim > 0 and x.shape not in an_example and x.shape in {leaf.shape for leaf in leaves}


def _model_shapes(call: tuple[str, list[Any]] | None) -> str | None:
    if call is None or not call[1]:
        return None
    return f"`{call[0]}` was called with {', '.join(map(leaf_text, call[1]))}."


def _strings_in(fn: Any) -> list[str]:
    """The strings in the closures of an optimiser where optax keeps numbers."""
    found, seen, todo = [], set(), [fn]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, tuple | list):
            todo += part
        if not isinstance(part, types.FunctionType):
            continue
        for word, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            value = None if cell == types.CellType() else cell.cell_contents
            if isinstance(value, str) and _NUMBERS.search(word):
                found.append(f"`{word}={value!r}`")
            todo.append(value)
    return found


def check_loss_signature(fn: Any, *, stateful: bool, hyper: Any) -> bool:
    """Raises unless the loss can be called as documented. Returns whether it takes `hyper`."""
    if not callable(fn):
        fix = "\nOnly methods take words for losses: `methods.Seeds(8).fit(...)`." if isinstance(fn, str) else ""
        raise TypeError(
            f"`{caller()}` needs the loss of one member as a function `loss(model, batch, key)`, got {fn!r}.{fix}"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    wants_hyper = "hyper" in signature.parameters
    if wants_hyper and hyper is None:
        raise TypeError(f"`{caller()}`: the loss has a parameter `hyper`, but no `hyper=` was given.")
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
            f"`{caller()}` calls the loss of one member as `loss({', '.join(wanted)})`; `{named}{signature}` cannot be "
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
