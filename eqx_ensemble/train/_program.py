"""The first state of a run; what a call of `fit` computes, traced once; and short texts of it.

The texts are digests that are the same in every process. They identify compiled programs and saved runs.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._caller import caller
from .._check import MemberMismatchError
from .._ensemble import Ensemble, M, check_ensemble, check_model_state, split_own
from .._foreign import from_foreign_tree
from .._keys import member_keys, own_key
from .._leaves import array_leaves, is_key
from .._marks import Each, Shared
from .._pytree import PyTree
from .._warnings import warn
from ..distributed import to_host
from ._meeting import MEMBERS, Optimiser, Together, alone
from ._member import Task, call, gradient_of, update_weights
from ._optimiser import first_state
from ._state import Status, Trainable, TrainState, allow_nan, trained_leaves, trained_of, weights_of


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as a static argument, equal to another one if the programs traced from them are."""

    fn: Callable[..., Any] = dataclasses.field(compare=False)
    digest: Any


@allow_nan()
def init(
    ensemble: Ensemble[M],
    optimiser: Optimiser,
    *,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    trainable: Trainable = eqx.is_inexact_array,
    key: Any,
) -> TrainState[M]:
    """The first training state of an ensemble, for [`eqx_ensemble.train.make_step`][].

    **Arguments:**

    - `ensemble`: the ensemble.
    - `optimiser`: an optax optimiser of one member; with `hyper` a function of a member's hyperparameters that returns
        one; or [`eqx_ensemble.train.Together`][].
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyperparameters, a PyTree of arrays `(members, ...)`.
    - `trainable`: which leaves are trained: a function of a leaf, or a prefix tree of booleans and functions, as in
        `equinox.partition`. Shared leaves and those in [`eqx_ensemble.train.Frozen`][] never are.
    - `key`: one key, or one per member `(members,)`.

    **Returns:** the training state.

    **Raises:** `TypeError` or `MemberMismatchError` for arguments that do not fit the ensemble.
    """
    check_ensemble(ensemble)
    num_members = ensemble.num_members
    check_model_state(ensemble, state)
    trained = trained_leaves(ensemble, trainable, together=isinstance(optimiser, Together))
    keys = member_keys(key, num_members, purpose="fit")
    parts = (ensemble, state, hyper_arrays(hyper, num_members), keys)
    first = lambda parts: first_training_state(parts, optimiser, trained)
    program, shapes, static = eqx.filter_make_jaxpr(first)(parts)
    kept = (program_text(program), jax.tree.structure(shapes), *jax.tree.leaves(static))
    return begin(Traced(first, kept), parts)


@eqx.filter_jit
def begin(first: Traced, parts: tuple) -> TrainState:
    """The first training state, in one program."""
    return first.fn(parts)


def first_training_state(parts: tuple, optimiser: Optimiser, trained: tuple[bool, ...]) -> TrainState:
    """The training state before the first step."""
    ensemble, model_state, hyper, keys = parts
    num_members = ensemble.num_members
    full = lambda value, dtype: jnp.full((num_members,), value, dtype)
    number = jnp.result_type(float)
    state = TrainState(
        ensemble, None, model_state, keys, hyper, full(0, jnp.int32), full(Status.OK, jnp.int8),
        full(jnp.nan, number), full(jnp.nan, number), None, full(jnp.nan, number), full(-1, jnp.int32),
        full(0, jnp.int32), trained=trained,
    )  # fmt: skip
    own, common, _ = weights_of(state)
    opt_state = eqx.filter_vmap(lambda *args: first_state(alone(optimiser), *args))(own, hyper, keys)
    state = eqx.tree_at(lambda state: state.opt_state, state, opt_state, is_leaf=lambda x: x is None)
    if isinstance(optimiser, Together):
        shared = Shared((first_state(optimiser.shared, common, None, None), None))
        state = eqx.tree_at(lambda state: state.together, state, shared, is_leaf=lambda x: x is None)
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype) if eqx.is_array(x) and not is_key(x) else x, state)


def hyper_arrays(hyper: PyTree, num_members: int) -> PyTree:
    """Hyperparameters as arrays `(members, ...)`; raises for another number of members."""
    hyper = from_foreign_tree(hyper, "hyper")
    if isinstance(hyper, Each):
        hyper = hyper.value
    is_values = lambda x: isinstance(x, list | tuple) and all(isinstance(v, int | float) for v in x)
    as_array = lambda x: jnp.asarray(jnp.asarray(x), jnp.asarray(x).dtype)
    hyper = jax.tree.map(as_array, hyper, is_leaf=is_values)
    for path, x in array_leaves(hyper):
        if x.shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`hyper` needs one value per member at `{path}`: expected ({num_members}, ...), got {x.shape}.\n"
                "A value for all members is an ordinary argument of the optimiser or a constant of the loss."
            )
    return hyper


def trace_task(task: Task, state: TrainState, batch: PyTree, validation: PyTree) -> tuple[Task, dict[str, str]]:
    """The task with the digest of its programs and the shapes of its outputs; and the digests by name.

    One member's loss, optimiser and score are traced, not run. An edited function, class, global or config object gives
    another digest, without a look at any code. `batch` and `validation` are what one member sees, as shapes.
    """
    __tracebackhide__ = True
    own, rest = split_own(state)
    of_one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    one, key, aux = eqx.combine(of_one(own), rest), jax.eval_shape(own_key), None
    size = {"num_members": state.num_members}

    def gradient(state: TrainState, batch: PyTree, key: Any) -> Any:
        nonlocal aux
        __tracebackhide__ = True
        now = trained_of(state)
        value, grads, model_state, aux = gradient_of(task, now, state, batch, key)[:4]
        aux = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), aux)
        return value, grads, model_state

    program, (value, grads, _), constants = eqx.filter_make_jaxpr(among(task, gradient, **size))(one, batch, key)
    if task.meets:
        value, grads = of_one((value, grads))
    digests = {"loss": program_text(program, (constants, shapes_text(aux)))}
    update, *_ = eqx.filter_make_jaxpr(optimiser_step)(task, one, value, grads)
    check_constants(update, state)
    digests["optimiser"] = program_text(update)
    calls_python = has_primitive(program, "callback")
    if task.score is not None:
        model = lambda state: eqx.nn.inference_mode(state.ensemble.stacked)
        own: Any = task.score
        score = lambda state, data, key: call(own, model(state), state.model_state, data, key, state.hyper)
        scoring, _, constants = eqx.filter_make_jaxpr(among(task, score, **size))(one, validation, key)
        digests["score"] = program_text(scoring, constants)
        calls_python |= has_primitive(scoring, "callback")
    found = jax.default_backend() == "cpu" and has_primitive(program, "conv_general_dilated")
    changes = {
        "products": found, "calls_python": calls_python, "outputs": aux, "digest": " ".join(digests.values()),
    }  # fmt: skip
    return dataclasses.replace(task, bytes_of_step=written_bytes(program), **changes), digests


def has_primitive(program: Any, name: str) -> bool:
    """Whether a program has a primitive with this in its name."""
    program = getattr(program, "jaxpr", program)
    own = any(name in eqn.primitive.name for eqn in program.eqns)
    return own or any(has_primitive(inner, name) for eqn in program.eqns for inner in inner_programs(eqn))


def written_bytes(program: Any) -> int:
    """About the bytes that a program writes: compilers fuse about three quarters of its operations."""
    program = getattr(program, "jaxpr", program)
    own = sum(x.aval.size * x.aval.dtype.itemsize for eqn in program.eqns for x in eqn.outvars) // 4
    return own + sum(written_bytes(inner) for eqn in program.eqns for inner in inner_programs(eqn))


def optimiser_step(task: Task, state: TrainState, value: Any, grads: PyTree) -> PyTree:
    """The optimiser's part of a step, with an arbitrary loss for those that evaluate it."""
    some_loss = lambda weights: (
        jnp.asarray(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(weights)), value.dtype),
        None,
    )
    step = lambda now, state, value, grads: update_weights(task, now, state, value, grads, some_loss)
    return among(task, step, num_members=1)(trained_of(state), state, value, grads)


def among(task: Task, fn: Callable[..., Any], *, num_members: int) -> Callable[..., Any]:
    """A function of one member as that of equal ones, if they meet, which needs their axis."""
    mapped = eqx.filter_vmap(fn, in_axes=None, axis_name=MEMBERS, axis_size=num_members)
    return mapped if task.meets else fn


def check_constants(program: Any, state: TrainState) -> None:
    """Raises if the optimiser of a member holds an array of one number per member, where it takes a scalar.

    optax would broadcast it over the last axis of the weights, without an error if that is as long by chance.
    """
    shapes = {x.shape[1:] for x in jax.tree.leaves(weights_of(state).own)}
    for x in constants_of(program) if state.num_members > 1 else ():
        if np.shape(x) == (state.num_members,) and jnp.issubdtype(x.dtype, jnp.floating) and shapes != {np.shape(x)}:
            raise ValueError(
                f"The optimiser is that of ONE member, and holds an array of {state.num_members} numbers, which optax "
                "would broadcast over the last axis of the weights.\nFor one number per member pass "
                "`hyper={'lr': ...}`, and the optimiser as a function: `lambda h: optax.adam(h['lr'])`."
            )


_SHOWN = 8
# Addresses in memory, and the names of functions that were sent to a worker by value, which lose them.
_VARYING = re.compile(r"(?: at )?0x[0-9a-f]+|name=\S+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")


def option_text(option: Any) -> str:
    """A text for a number, a string, a key, or one number per member, regardless of the type of a number."""
    if option is None or isinstance(option, str):
        return repr(option)
    values = np.asarray(to_host(jax.random.key_data(option) if is_key(option) else option))
    return array_text(values) if values.size > _SHOWN else repr(values.tolist())


def array_text(x: Any) -> str:
    """An array's dtype, shape, first values and digest."""
    x = np.asarray(to_host(x))
    first = ", ".join(map(str, x.reshape(-1)[:_SHOWN])) + ", ..." * (x.size > _SHOWN)
    return f"{x.dtype}[{','.join(map(str, x.shape))}] [{first}], {digest_of(x)}"


def array_texts(tree: PyTree, root: str) -> dict[str, str]:
    """A text for every array of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {f"{root}{jax.tree_util.keystr(path)}": array_text(x) for path, x in keyed}


def shapes_text(tree: PyTree) -> str:
    """The shapes of the arrays of a tree."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    text = lambda path, x: f"{jax.tree_util.keystr(path)} {x.dtype}[{','.join(map(str, x.shape))}]".strip()
    return ", ".join(text(path, x) for path, x in keyed)


def digest_of(tree: PyTree) -> str:
    """A digest of the arrays and numbers of a tree, with their paths."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if eqx.is_array(x) or isinstance(x, bool | int | float | complex | np.generic):
            kind = jax.random.key_impl(x) if is_key(x) else ""  # pyright: ignore[reportArgumentType]
            x = np.ascontiguousarray(to_host(x))
            digest.update(f"{jax.tree_util.keystr(path)} {kind} {x.dtype} {x.shape}".encode())
            digest.update(x.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def program_text(jaxpr: Any, constant_out: PyTree = None) -> str:
    """A digest of a traced program with its constants."""
    text = _SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", _VARYING.sub("", str(jaxpr)))
    return hashlib.sha256((text + digest_of((list(constants_of(jaxpr)), constant_out))).encode()).hexdigest()


def constants_of(jaxpr: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for part in inner_programs(eqn):
            yield from constants_of(part)


def inner_programs(eqn: Any) -> list[Any]:
    """The programs in the parameters of an equation."""
    return [x for x in jax.tree.leaves(list(eqn.params.values())) if isinstance(x, Jaxpr | ClosedJaxpr)]


def versions_text() -> str:
    """What changes the last bits of results."""
    return f"jax {jax.__version__}, {jax.default_backend()}, x64 {jax.config.read('jax_enable_x64')}"


# What another version of JAX may change.
_OF_VERSIONS = {"versions", "loss", "optimiser", "score", "weights", "optimiser's state"}


def check_same_call(saved: dict[str, str], now: dict[str, str], path: Any) -> None:
    """Raises if a file is of another call; warns if it was written by another version of JAX."""
    is_other = saved["versions"] != now["versions"]
    left_out = _OF_VERSIONS if is_other else set()
    differ = [name for name in {**saved, **now} if name not in left_out and saved.get(name) != now.get(name)]
    if differ:
        lines = [f"  `{name}`: saved {saved.get(name)}, now {now.get(name)}" for name in differ]
        raise ValueError(
            f"`{caller()}` cannot resume from `{path}`: this call differs from the one that wrote it.\n"
            + "\n".join(lines)
            + "\nRepeat that call, or save elsewhere."
        )
    if is_other:
        versions = f"{saved['versions']}; this is {now['versions']}"
        warn(f"`{caller()}` resumes from `{path}`, which was written by {versions}: the last bits may differ.")
