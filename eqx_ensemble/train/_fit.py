import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._check import check_positive_int, check_word
from .._data import is_batches, member_shapes, take_data, take_rows
from .._ensemble import Ensemble, M
from .._keys import member_keys
from .._leaves import is_inside_transformation
from .._marks import Each
from .._mesh import check_mesh, mesh_of, rows_of_mesh
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from .._warnings import warn
from ..distributed import to_host
from ..plan import AnyPlan, Blocks, Vmap, as_plan
from ._blocks import Crew
from ._history import check_same_aux, empty_history
from ._loop import Loop, Position, deferred_interrupt
from ._meeting import JointLoss, Optimiser, Together, alone, check_alike
from ._member import Task, takes_hyper
from ._optimiser import is_function
from ._options import Checkpoint, Every, Stopping, Validation, callbacks_of, limits_of
from ._program import init, trace_task
from ._run import Run, best_of, warn_of_diverged, warn_of_undefined
from ._saver import Saver, call_texts
from ._state import DivergedError, Status, Trainable, TrainState, allow_nan, with_best

_LONGEST_PART = 512  # steps of an epoch that are kept or given back at once
_NEVER = 2**31 - 1
_STEPS_WITHOUT_DATA = 100  # of an epoch
_ROOM = 1024  # steps of a call, at most, whose losses wait on the device


def fit(
    ensemble: Ensemble[M] | TrainState[M] | Run[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Iterable[PyTree] | None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    validation: PyTree = None,
    patience: int | None = None,
    stop: Stopping | None = None,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    rows: Any = None,
    shuffle: bool = True,
    has_aux: bool = False,
    history: Literal["steps", "epochs"] = "steps",
    trainable: Trainable = eqx.is_inexact_array,
    on_diverge: Literal["freeze", "raise"] = "freeze",
    plan: AnyPlan | None = None,
    mesh: Mesh | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    progress: bool | None = None,
    callbacks: Callable[..., Any] | Every | list[Any] | None = None,
    key: Any = None,
) -> Run[M]:
    """Trains all members of an ensemble, each as if alone with the same key and data.

    Results agree bit for bit in blocks of one member on one CPU device, otherwise up to rounding. Loss and optimiser
    are written for ONE member. [How a fit runs](../how-a-fit-runs.md) shows the function of one member that is mapped
    over all.

    **Arguments:**

    - `ensemble`: the ensemble to train; or a training state or run to continue, with its own model state and keys.
    - `loss`: `loss(model, batch, key) -> value` on one batch `(batch, ...)`; for stateful members
        `loss(model, state, batch, key) -> (value, state)`. A parameter named `hyper` receives the member's
        hyperparameters. Or [`eqx_ensemble.train.JointLoss`][], of all members' predictions.
    - `optimiser`: an optax optimiser; with `hyper`, a function of a member's hyperparameters that returns one; or
        [`eqx_ensemble.train.Together`][], which also trains shared leaves.

    *Data and rows:*

    - `data`: a PyTree of arrays `(rows, ...)`, or `(members, rows, ...)` in parts marked [`eqx_ensemble.Each`][]; or an
        iterable of batches, of which one pass is an epoch. `None` for a loss that draws its own points from `key`, as
        that of a physics-informed network: it is called `loss(model, None, key)`, and 100 steps are an epoch.
    - `batch_size`: rows per step; by default 32. Every batch is full: the last one of an epoch is filled with the first
        rows of the next.
    - `rows`: row indices `(members, n)` into `data`.
    - `shuffle`: whether each member draws its own permutation of the rows in every epoch, or takes their order.

    *Length:*

    - `epochs` or `steps`: the length of the run, without earlier runs.

    *Validation and stopping, at ends of epochs:*

    - `validation`: arrays as for `data`, scored as one batch in inference mode; or
        [`eqx_ensemble.train.Validation`][]. Members keep their best weights.
    - `patience`: a member stops after this many epochs without a better validation score.
    - `stop`: [`eqx_ensemble.train.Stopping`][]: members stop at a score, or after some steps or time.

    *Members:*

    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyperparameters, a PyTree of arrays `(members, ...)`.
    - `trainable`: which leaves of a member are trained, as in [`eqx_ensemble.train.init`][].
    - `on_diverge`: what happens if a member's loss or weights are not finite at the end of an epoch. `"freeze"`: it
        gets back those of the epoch's start and stops, with a warning at the end; `"raise"`:
        [`eqx_ensemble.train.DivergedError`][]. [`eqx_ensemble.train.revive`][] is a callback that trains it on.

    *Execution:*

    - `plan`: by default [`eqx_ensemble.plan.Blocks`][] on a CPU, elsewhere [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: the devices, from [`eqx_ensemble.make_mesh`][]; by default those on which the members are. Its axis
        `members` splits the members, `data` the rows of batches.
    - `key`: one key, or one per member `(members,)`: [`eqx_ensemble.member_keys`][]`(key, members, purpose="fit")`. A
        state that continues has keys; others replace them.

    *Record:*

    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `history`: whether the losses of all steps are recorded, or the mean of each epoch, of parts of at most 512 steps
        if it is longer.
    - `checkpoint`: a file, or [`eqx_ensemble.train.Checkpoint`][]. The run is saved there about every minute and at its
        end; rerunning the same call [resumes bit for bit](../saving.md), and more epochs continue.
    - `progress`: whether to show a progress line: epochs or steps, the members that still train, and the best
        validation score or the mean loss; by default on a terminal or in a notebook, after two seconds.
    - `callbacks`: functions of the [`eqx_ensemble.train.TrainState`][] at the end of every epoch, or, by
        [`eqx_ensemble.train.every`][], of some. They return another state, or `None` to go on.

    **Returns:** [`eqx_ensemble.Run`][]. Ctrl-C returns the run so far.

    **Raises:** `TypeError`, `ValueError` or `IndexError`, before compiling, for arguments that do not fit together;
    `ValueError`, with the differences, if `checkpoint` holds another call; [`eqx_ensemble.train.DivergedError`][] with
    `on_diverge="raise"`. An error after the first epoch, of a callback or of the data, has the run so far as its
    attribute `run`.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=2, key=key)
    ```
    """
    began = time.perf_counter()
    check_outside()
    check_mesh(mesh)
    first, continued = start(ensemble, optimiser, state=state, hyper=hyper, trainable=trainable, key=key)
    mesh = mesh_of(first.ensemble) if mesh is None else mesh
    num_members, lost_before = first.num_members, to_host(first.status) == Status.DIVERGED
    validation = validation if isinstance(validation, Validation | None) else Validation(validation)
    check_options(epochs, steps, patience, stop, validation, on_diverge, history)
    check_use_of_hyper(hyper, optimiser, loss, None if validation is None else validation.score, callbacks)
    limits = limits_of(stop or Stopping(), num_members)
    seconds = limits.pop("seconds", None)
    inputs: dict[str, Any] = {"data": None, "rows": None, "validation": None, "limits": limits}
    if validation is not None:
        if isinstance(ensemble, Run) and first.best is not None and ensemble.mode != validation.mode:
            raise ValueError(
                f"`fit` continues a run with best scores of `mode` {ensemble.mode!r}, not {validation.mode!r}.\n"
                "To begin again with its weights: `fit(run.ensemble, ...)`."
            )
        first = with_best(first, validation.mode)
        inputs["validation"], _ = take_data(validation.data, num_members, argument="validation")
    if data is None or is_batches(data):
        check_no_rows(batch_size, rows, shuffle)
    num_rows = None
    if is_batches(data):
        batches, batch = peek(data, num_members)
        shape: dict[str, Any] = {"part": _LONGEST_PART, "epoch": _LONGEST_PART}
    else:
        batches = None
        if data is None:  # as of so many rows of nothing, one a batch
            shape = shape_of_epoch(_STEPS_WITHOUT_DATA, 1, first)
        else:
            inputs["data"], num_rows = take_data(data, num_members, argument="data")
            inputs["rows"] = own = take_rows(rows, num_members, num_rows)
            shape = shape_of_epoch(num_rows if own is None else own.value.shape[1], batch_size, first)
        batch = member_shapes(inputs["data"], shape["batch_size"])
    score = None if validation is None else validation.score or loss
    for fn, names in ((loss, ("data", "rows")), (score, ("validation",))):
        if isinstance(fn, JointLoss):
            check_alike({name: inputs[name] for name in names})
    joint = lambda fn: (
        dataclasses.replace(fn, _num_members=num_members, _mesh=mesh) if isinstance(fn, JointLoss) else fn
    )
    task = Task(
        joint(loss), optimiser, joint(score), has_aux=has_aux,
        shuffle=bool(shuffle), patience=patience, mode="min" if validation is None else validation.mode,
        min_delta=0.0 if validation is None else validation.min_delta, per_step=history == "steps",
        rows_of_mesh=rows_of_mesh(mesh), **shape,
    )  # fmt: skip
    task, digests = trace_task(task, first, batch, member_shapes(inputs["validation"]))
    plan = as_plan(plan, Blocks() if jax.default_backend() == "cpu" else Vmap())
    end = _NEVER  # of an iterable of batches it is not known how many there are
    if steps or batches is None:
        end = min(steps or (epochs or 0) * task.epoch, _NEVER)
    curves = empty_history(num_members, task.outputs, validates=validation is not None, dtype=first.loss.dtype)
    if continued is not None:
        check_same_aux([continued, curves])
        curves = continued
    options = {
        "patience": patience, "batch_size": batch_size, "shuffle": shuffle, "mode": task.mode,
        "min_delta": task.min_delta, "history": history, "on_diverge": on_diverge,
    }  # fmt: skip
    saver = None
    with allow_nan(), ExitStack() as stack, deferred_interrupt() as interrupt:
        position = Position(first, curves, 0, 0, ensemble.seconds if isinstance(ensemble, Run) else 0.0)
        if checkpoint is not None:
            saver = stack.enter_context(Saver(checkpoint, call_texts(digests, position, inputs, options)))
            position = saver.resume(position, end, epochs)
        if "steps" in limits:  # a member that is past its limit trains no further epoch
            over = (position.state.step >= limits["steps"].value) & (position.state.status == Status.OK)
            status = jnp.where(over, jnp.int8(Status.STOPPED), position.state.status)
            position = position._replace(state=eqx.tree_at(lambda state: state.status, position.state, status))
        check_some_train(position)
        crew = Crew(position.state, inputs, task, plan, mesh)
        stack.callback(crew.close)
        words = f"fit, {members_in_words(num_members)}"
        unit = "step" if epochs is None else "epoch"
        line = stack.enter_context(progress_line(show=progress, description=words, unit=unit, total=epochs or steps))
        loop = Loop(
            crew, task, position, first=int(to_host(first.step).max()), end=end, callbacks=callbacks_of(callbacks),
            seconds=seconds, began=began, fatal=~lost_before & (on_diverge == "raise"), saver=saver, line=line,
            in_epochs=epochs is not None, interrupt=interrupt,
        )  # fmt: skip
        result = lambda: run_of(loop, rows, num_rows, None if validation is None else task.mode)
        try:
            if batches is None:
                loop.train_on_arrays()
            else:
                loop.train_on_batches(batches, position.done, epochs)
            if saver is not None:
                saver.finish(loop)
        except Exception as error:
            if loop.done and not crew.is_lost:
                error.run = result()  # pyright: ignore[reportAttributeAccessIssue]
            raise
        run = result()
    if loop.faulty:
        lost = np.flatnonzero((run.status == Status.DIVERGED) & ~lost_before)
        raise DivergedError(f"`fit`: members {', '.join(map(str, lost))} diverged.", run)
    warn_of_diverged(run, lost_before, joint=task.joint)
    if validation is not None:
        warn_of_undefined(run)
    return run


def check_outside() -> None:
    """Raises inside a transformation, where training cannot make decisions by concrete values."""
    if is_inside_transformation():
        raise TypeError(
            "`fit` cannot run inside `jax.jit`, `jax.vmap`, `jax.grad` or another transformation: it decides on the "
            "host.\nThere, use `train.make_step` with `train.scan_steps`."
        )


def check_use_of_hyper(hyper: Any, optimiser: Any, loss: Any, score: Any, callbacks: Any) -> None:
    """Warns of hyperparameters that neither optimiser nor loss takes: all members would be trained alike."""
    takes = is_function(alone(optimiser)) or any(takes_hyper(fn) for fn in (loss, score) if fn)
    if hyper is not None and not takes and not callbacks:
        warn(
            "`fit`: nothing uses `hyper`. Pass a function of it as the optimiser, "
            "`lambda hyper: optax.adam(hyper['lr'])`, or give the loss a parameter `hyper`."
        )


def start(ensemble: Any, optimiser: Any, *, state: Any, hyper: Any, trainable: Any, key: Any) -> tuple[TrainState, Any]:
    """The first training state of a call, and the history that it continues."""
    if not isinstance(ensemble, TrainState | Run):
        return init(ensemble, optimiser, state=state, hyper=hyper, trainable=trainable, key=key), None
    first = ensemble.train_state if isinstance(ensemble, Run) else ensemble
    if state is not None or hyper is not None or trainable is not eqx.is_inexact_array:
        raise TypeError(
            "`fit` continues a training state with its own `state`, `hyper` and `trainable`: leave them out.\n"
            "To change one: `equinox.tree_at(lambda state: state.hyper, state, new)`."
        )
    if isinstance(optimiser, Together) != (first.together is not None):
        raise TypeError("`fit` continues a state of another optimiser: pass the one that `train.init` got.")
    if key is not None:
        keys = member_keys(key, first.num_members, purpose="fit")
        first = eqx.tree_at(lambda state: state.keys, first, keys)
    return first, ensemble.history if isinstance(ensemble, Run) else None


def check_options(
    epochs: Any, steps: Any, patience: Any, stop: Any, validation: Any, on_diverge: Any, history: Any
) -> None:
    """Checks the options that need no members."""
    if (epochs is None) == (steps is None):
        raise TypeError(f"`fit` needs either `epochs` or `steps`, got {'neither' if epochs is None else 'both'}.")
    check_positive_int(epochs if steps is None else steps, "epochs" if steps is None else "steps")
    check_word(on_diverge, "on_diverge", ("freeze", "raise"))
    check_word(history, "history", ("steps", "epochs"))
    if not isinstance(stop, Stopping | None):
        raise TypeError(f"`fit` needs `stop` to be a `train.Stopping`, got `{type(stop).__name__}`.")
    if patience is not None:
        check_positive_int(patience, "patience")
    if validation is None and (patience is not None or (stop is not None and stop.target is not None)):
        raise TypeError("`fit` needs `validation=` data with `patience` or a target: members stop by their scores.")


def check_some_train(position: Position) -> None:
    """Raises if no member is training at the begin of a run."""
    if position.done == 0 and not (to_host(position.state.status) == Status.OK).any():
        raise ValueError(
            "`fit` has no member left to train: all have stopped or diverged.\n"
            "To train their weights again, pass the ensemble: `fit(run.ensemble, ...)`."
        )


def check_no_rows(batch_size: Any, rows: Any, shuffle: Any) -> None:
    """Raises if an option for data in arrays comes with an iterable of batches, or without data."""
    if batch_size is not None or rows is not None or shuffle is not True:
        raise TypeError("`fit` takes `batch_size`, `rows` and `shuffle` only for data in arrays.")


def peek(data: Any, num_members: int) -> tuple[Iterator[Iterable[Any]], PyTree]:
    """The passes over an iterable, the first of which has begun, and the shapes of one member's first batch."""
    iterator = iter(data)
    for batch in iterator:
        shapes = member_shapes(take_data(batch, num_members, argument="batch")[0])
        return itertools.chain([itertools.chain([batch], iterator)], itertools.repeat(data)), shapes
    raise ValueError("`fit` needs at least one batch of `data`, got none.")


def shape_of_epoch(num_rows: int, batch_size: int | None, first: TrainState) -> dict[str, int]:
    """The steps of an epoch, and of the equal parts of a long one. They follow from the number of steps alone, so that
    results do not depend on the machine.
    """
    size = min(check_positive_int(32 if batch_size is None else batch_size, "batch_size"), num_rows)
    epoch = -(-num_rows // size)
    part = -(-epoch // -(-epoch // _LONGEST_PART))
    begun = to_host(first.step)
    is_aligned = num_rows % size == 0 and epoch % part == 0 and not (begun % part).any()
    permutations = 1 if is_aligned else (part * size - 1) // num_rows + 2
    return {
        "num_rows": num_rows, "batch_size": size, "epoch": epoch, "part": part,
        "permutations": permutations, "room": max(_ROOM // part, 1),
    }  # fmt: skip


def run_of(loop: Loop, rows: Any, num_rows: int | None, mode: Literal["min", "max"] | None) -> Run:
    """The result of a loop, as far as it has come; with the best weights if members were scored."""
    state = loop.crew.state()
    ensemble, model_state = (state.ensemble, state.model_state) if mode is None else best_of(state)
    rows = None if rows is None else np.asarray(rows.value if isinstance(rows, Each) else rows)
    interrupted = loop.interrupt.is_set()
    parts = ensemble, model_state, loop.curves(), state, rows, mode or "min", interrupted, loop.seconds_so_far()
    return Run(*parts, num_rows)
