import dataclasses
import functools as ft
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._check import check_optional_flag, is_key
from .._compiled import ProgramKey, program_key
from .._ensemble import Ensemble, M
from .._foreign import as_hashable, from_foreign_tree
from .._jaxpr import unused_inputs
from .._pytree import PyTree
from .._sharding import shard_members
from .._warnings import ignore_warnings, warn
from ..distributed import to_host
from ..plan import AnyPlan, Cores
from ..plan._engine import as_plan, plan_in_program
from ._callback import Callback, check_callbacks
from ._check import (
    check_hyper_used,
    check_no_transformation,
    check_plan_together,
    check_same_structure,
    check_some_training,
)
from ._check_member import hyper_column_text
from ._check_run import check_outcome
from ._options import Checkpoint, Stopping, as_checkpoint, check_options, limits_of
from ._revive import Revive
from ._run import Run
from ._state import MemberConstants, TrainState
from ._status import Status
from ._together import Together, bind
from ._trainable import Trainable
from .compiled._loss import Loss, make_losses
from .compiled._optimiser import Optimiser
from .compiled._program import Program
from .compiled._selection import make_limits, stop_at_limits
from .data._rows import Shuffle
from .data._source import Length, member_shapes, without_marks
from .data._sources import make_source
from .host._execute import execute
from .host._saver import Saver, identify, optimiser_step
from .host._start import layout_of, start_of, with_validation


def check_same_aux(begun: Any, loss: Loss, first: TrainState, batch: Callable[[], PyTree] | None) -> None:
    """Raises if a run continues without the auxiliary outputs that its history has, or with the first ones.

    `batch` returns the shapes of one member's batch; without it, new outputs are refused after the first steps.
    """
    if not isinstance(begun, Run) or (begun.history.aux is not None) == loss.has_aux:
        return
    if loss.has_aux and (batch is None or not _returns_arrays(loss, first, batch())):
        return
    before, now = (f"`has_aux={has_aux}`" for has_aux in (not loss.has_aux, loss.has_aux))
    raise TypeError(
        f"`fit` continues a run whose history was recorded with {before}; got {now}.\n"
        "Keep `has_aux`, which the history needs; or continue from `run.train_state`, with a history of its own."
    )


def _returns_arrays(loss: Loss, state: TrainState, batch: PyTree) -> bool:
    """Whether the loss's auxiliary outputs hold any array; a loss that fails is called again by the first step."""
    moving, fixed = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, (state.moving, state.fixed))
    call = lambda *args: loss(*args)[1][1]
    try:
        with ignore_warnings():
            aux = eqx.filter_eval_shape(
                call, moving.params, moving.model_state, fixed, member_shapes(state.shared), batch, fixed.key
            )
    except Exception:
        return False
    return bool(jax.tree.leaves(aux))


def warn_of_unused_hyper(state: TrainState, optimiser: Optimiser, losses: list[tuple[Loss, PyTree]]) -> None:
    """Warns of hyper-parameters without effect: nothing uses them, and no member was built with them.

    `losses` are those that take hyper-parameters, each with the shapes of one member's batch.
    """
    one = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x, tree
    )
    moving, fixed, ids = one((state.moving, state.fixed, state.ids))
    value = jax.ShapeDtypeStruct((), jnp.result_type(float))
    unused = _find_unused(optimiser_step, optimiser, fixed.hyper, moving, ids, value)
    for loss, batch in losses:
        if any(unused):
            own = _find_unused(_loss_of, loss, fixed.hyper, moving, fixed, member_shapes(state.shared), batch)
            unused = [a and b for a, b in zip(unused, own, strict=True)]
    keyed = zip(jax.tree_util.tree_leaves_with_path(state.hyper), unused, strict=True)
    names = [hyper_column_text(path) for (path, x), is_unused in keyed if is_unused and not _is_in_members(x, state)]
    if names:
        words = ", ".join(f"`{name}`" for name in names)
        warn(f"`fit` got {words} in `hyper`, but neither the optimiser nor the loss uses it: is the name misspelt?")


def _is_in_members(values: Any, state: TrainState) -> bool:
    """Whether the members hold these values, as after `build(zip=...)`."""
    same = [
        x
        for x in jax.tree.leaves((state.params, state.fixed.frozen))
        if eqx.is_array(x) and not is_key(x) and (x.shape, x.dtype) == (values.shape, values.dtype)
    ]
    return any(np.array_equal(to_host(values), to_host(x)) for x in same)


def _find_unused(call: Callable[..., Any], fn: Any, *args: PyTree) -> list[bool]:
    leaves, treedef = jax.tree.flatten(args)
    return _unused_leaves(call, fn, tuple(leaves), treedef, program_key((fn, args)))


@ft.lru_cache(maxsize=64)
def _unused_leaves(call: Callable[..., Any], fn: Any, leaves: tuple, treedef: Any, _: ProgramKey) -> list[bool]:
    args = jax.tree.unflatten(treedef, leaves)
    try:
        with ignore_warnings():  # they are repeated when it is traced for training
            closed, _, _ = eqx.filter_make_jaxpr(ft.partial(call, fn))(*args)
    except Exception:  # raised again, with a note, when it is traced for training
        return [False] * len(jax.tree.leaves(args[0]))
    return unused_inputs(closed.jaxpr)[: len(jax.tree.leaves(args[0]))]


def _loss_of(loss: Loss, hyper: PyTree, moving: Any, fixed: MemberConstants, shared: PyTree, batch: PyTree) -> Any:
    model = eqx.combine(moving.params, fixed.frozen, shared)
    arguments = (model, moving.model_state, batch, fixed.key) if loss.stateful else (model, batch, fixed.key)
    return loss.fn(*arguments, hyper=hyper)


def fit(
    ensemble: Ensemble[M] | TrainState[M] | Run[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Iterable[PyTree],
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
    shuffle: Shuffle = True,
    has_aux: bool = False,
    history: Literal["all", "last"] | int = "all",
    trainable: Trainable = eqx.is_inexact_array,
    on_diverge: Literal["freeze", "revive", "raise"] | Revive = "freeze",
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    progress: bool | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    key: Any,
) -> Run[M]:
    """Trains all members of an ensemble; each becomes the model that training it alone would give.

    Loss and optimiser are written for ONE member. Calls with the same loss and optimiser objects and the same shapes
    share one compiled program.

    **Arguments:**

    - `ensemble`: the ensemble to train, or a training state or run to continue, with its own `state` and `hyper`.
    - `loss`: `loss(model, batch, key) -> value` on one batch `(batch, ...)`; for stateful members
        `loss(model, state, batch, key) -> (value, state)`. A parameter named `hyper` receives the member's
        hyper-parameters.
    - `optimiser`: an optax optimiser; with `hyper`, a function of a member's hyper-parameters that returns one; or
        [`eqx_ensemble.train.Together`][], which also trains shared leaves.

    *Data and rows:*

    - `data`: a PyTree of arrays `(rows, ...)`, or `(members, rows, ...)` in parts marked [`eqx_ensemble.Each`][]; an
        [`eqx_ensemble.train.RowReader`][]; or an iterable of batches, iterated once per epoch.
    - `batch_size`: rows per step; by default 32. The last batch of an epoch may be smaller.
    - `rows`: row indices `(members, n)` into `data`.
    - `shuffle`: `True`: own permutations for each member and epoch; `"shared"`: the same for all members, which is
        faster; `False`: the order of the data. [How they are computed](../same-results.md#row-orders).

    *Length:*

    - `epochs` or `steps`: the length of the run, without earlier runs.

    *Validation and stopping:*

    - `validation`: arrays as for `data`, scored as one batch in inference mode at the end of every epoch; or
        [`eqx_ensemble.train.Validation`][]. Members keep their best weights.
    - `patience`: a member stops after this many epochs without a better validation score.
    - `stop`: [`eqx_ensemble.train.Stopping`][]: members stop at a score, or after some steps or time.

    *Members:*

    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, a PyTree of arrays `(members, ...)`.
    - `trainable`: which leaves of a member are trained, as in [`eqx_ensemble.train.init`][].

    *Execution:*

    - `plan`: how the members are executed: by default [`eqx_ensemble.plan.Cores`][] on a CPU, elsewhere
        [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: the devices, from [`eqx_ensemble.make_mesh`][]; by default those of the ensemble. Its axis `members`
        splits the members, `data` the rows of batches: [several devices](../scale.md).
    - `key`: the root key. A member's random streams are derived from it and the member's id.

    *Divergence:*

    - `on_diverge`: if a loss or weights are not finite. `"freeze"`: the member keeps its last finite weights, with a
        warning at the end; `"revive"`: it continues as a copy of a healthy member, or as
        [`eqx_ensemble.train.Revive`][] says; `"raise"`: [`eqx_ensemble.train.DivergedError`][].

    *Saving:*

    - `checkpoint`: a file, or [`eqx_ensemble.train.Checkpoint`][]. The run is saved there about every minute and at its
        end; rerunning the same call [resumes bit for bit](../saving.md), and more epochs continue.

    *History and callbacks:*

    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `history`: the steps whose losses are recorded: `"all"`; with an int `n`, every `n`-th and the last; or only the
        `"last"`. [The others do not leave the device](../scale.md#a-thinner-history).
    - `progress`: whether to show a progress line; by default on a terminal or in a notebook.
    - `callbacks`: one [`eqx_ensemble.train.Callback`][] or a list of them, called about once a second, and at the end.

    **Returns:** [`eqx_ensemble.Run`][]. Ctrl-C returns the run so far.

    **Raises:**

    - `TypeError`, `ValueError` or `IndexError`, before compiling, for arguments that do not fit together.
    - `ValueError`, with the differences, if `checkpoint` holds another call; `BlockingIOError` if another run uses it;
        `CheckpointCorruptError` if it is damaged, or another kind of file.
    - `MemoryError`, with a smaller plan, if the device runs out of memory.
    - [`eqx_ensemble.train.DivergedError`][] with `on_diverge="raise"`; [`eqx_ensemble.train.NotSavedError`][] if a
        checkpoint cannot be written. Both hold the run so far, as does the attribute `run` of errors that the data, the
        loss or a callback raise after the first step.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=2, key=key)
    ```
    """
    check_no_transformation()
    optimiser = as_hashable(optimiser)
    data = from_foreign_tree(data, "data")
    check_optional_flag(progress, "progress")
    given = check_options(
        epochs=epochs, steps=steps, validation=validation, patience=patience, stop=stop, shuffle=shuffle,
        has_aux=has_aux, history=history, on_diverge=on_diverge,
    )  # fmt: skip
    held_out, how, windows = given.validation, given.on_diverge, given.windows
    score, mode = given.scoring
    callbacks = check_callbacks(callbacks)
    saved = as_checkpoint(checkpoint)
    saver = None if saved is None else Saver(saved)
    layout = layout_of(mesh, ensemble)
    plan = Cores() if plan is None and not isinstance(optimiser, Together) else as_plan(plan)
    check_plan_together(optimiser, plan)
    start = start_of(
        ensemble, optimiser, state=state, hyper=hyper, trainable=trainable, layout=layout,
        has_validation=held_out is not None, mode=mode, windows=windows, key=key,
    )  # fmt: skip
    first = start.state
    optimiser = bind(optimiser, first.fixed.tied)
    stops = limits_of(given.stop, first.num_members)
    limits = make_limits(stops["steps"], stops["target"], first.num_members, **given.improving)
    limits = limits if layout is None else shard_members(limits, layout)
    losses = make_losses(first, loss, score, has_aux=has_aux, has_validation=held_out is not None)
    program = Program(
        losses[0], optimiser, plan, layout, losses[1], given.patience, halts=isinstance(how, Revive), windows=windows,
        program_key=program_key((losses, optimiser, plan_in_program(plan), first)),
    )  # fmt: skip
    if first.fixed.hyper is not None:
        check_hyper_used(optimiser, wants_hyper=any(fn is not None and fn.wants_hyper for fn in losses))
    source = make_source(
        data, first, epochs=epochs, rows=rows, shuffle=shuffle, batch_size=batch_size, scan=plan.scan, layout=layout,
        key=key,
    )  # fmt: skip
    is_known = source.epoch is not None  # batches of an iterable are not known in advance
    check_same_aux(ensemble, losses[0], first, source.shapes if is_known else None)
    if held_out is not None:
        if score is None and is_known:
            check_same_structure(without_marks(held_out.data), source.shapes())
        start, validation = with_validation(start, losses[1], held_out.data, layout, data=data)
    if first.fixed.hyper is not None and is_known:
        seen = ((losses[0], source.shapes()), (losses[1], member_shapes(validation)))
        warn_of_unused_hyper(first, optimiser, [(fn, own) for fn, own in seen if fn is not None and fn.wants_hyper])
    if saver is not None:
        options = {"key": key, "stop.steps": stops["steps"], "stop.target": stops["target"], "on_diverge": how}
        options |= given.improving | {"mode": mode, "history": windows.name}
        here = identify(program, start, source.shapes(), validation, source.fingerprint, options)
        program = dataclasses.replace(program, traced=here.programs)
        start = saver.resume(start, here)
    if saver is None or saver.step < 0:  # a run that was saved may have ended
        training = to_host(stop_at_limits(first.moving, limits, first.step).status) == Status.OK
        check_some_training(training, ids=to_host(first.ids))
    length = Length(start.begun, *(None if given is None else int(given) for given in (epochs, steps)))
    lost_before = to_host(first.moving.status) == Status.DIVERGED
    run = execute(
        program, start, source, length, limits=limits, validation=validation, on_diverge=how, lost_before=lost_before,
        seconds=stops["seconds"], saver=saver, progress=progress, callbacks=callbacks, key=key,
    )  # fmt: skip
    check_outcome(run, lost_before, how, saver=saver, first_step=length.begun, source=source)
    return run
