"""What a call of `fit` computes, traced once: its digest identifies compiled programs and saved runs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._members import split
from .._pytree import PyTree
from ._convolutions import has_convolution
from ._member import MEMBERS, Task, call, gradient_of, trained_of, update_weights
from ._optimiser import Together
from ._state import TrainState, weights_of
from ._texts import inner_programs, program_text, shapes_text


def trace_task(task: Task, state: TrainState, batch: PyTree, validation: PyTree) -> tuple[Task, dict[str, str]]:
    """The task with the digest of its programs and the shapes of its outputs; and the digests by name.

    One member's loss, optimiser and score are traced, not run. An edited function, class, global or config object gives
    another digest, without a look at any code. `batch` and `validation` are what one member sees, as shapes.
    """
    own, rest = split(state)
    one = eqx.combine(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own), rest)
    key = jax.eval_shape(lambda: jax.random.key(0))
    aux = None

    def gradient(state: TrainState, batch: PyTree, key: Any) -> Any:
        nonlocal aux
        now = trained_of(state)
        value, grads, model_state, aux = gradient_of(task, now, state, batch, key)[:4]
        aux = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), aux)
        return value, grads, model_state

    program, (value, grads, _), constants = eqx.filter_make_jaxpr(gradient)(one, batch, key)
    digests = {"loss": program_text(program, (constants, shapes_text(aux)))}
    update, *_ = eqx.filter_make_jaxpr(optimiser_step)(task, one, value, grads)
    check_constants(update, state)
    digests["optimiser"] = program_text(update)
    if task.score is not None:
        model = lambda state: eqx.nn.inference_mode(state.ensemble.stacked)
        own: Any = task.score
        score = lambda state, data, key: call(own, model(state), state.model_state, data, key, state.hyper)
        digests["score"] = program_text(*eqx.filter_make_jaxpr(score)(one, validation, key)[::2])
    found = jax.default_backend() == "cpu" and has_convolution(program)
    changes = {"products": found, "outputs": aux, "digest": " ".join(digests.values())}
    return dataclasses.replace(task, bytes_of_step=written_bytes(program), **changes), digests


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
    if isinstance(task.optimiser, Together):  # whose means need the axis of the members
        step = eqx.filter_vmap(step, in_axes=None, axis_name=MEMBERS, axis_size=1)
    return step(trained_of(state), state, value, grads)


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


def constants_of(program: Any) -> Iterator[Any]:
    """The constants of a program and of those inside it."""
    yield from getattr(program, "consts", ())
    for eqn in program.eqns:
        for inner in inner_programs(eqn):
            yield from constants_of(inner)
