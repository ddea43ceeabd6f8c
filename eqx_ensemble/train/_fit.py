import dataclasses
import functools as ft
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._check import check_optional_flag, is_key
from .._compiled import ProgramKey, program_key
from .._ensemble import Ensemble, Group, M
from .._foreign import as_hashable, from_foreign_tree
from .._jaxpr import unused_inputs
from .._pytree import PyTree
from .._suggest import explain_as
from .._typing import ByPart
from .._warnings import ignore_warnings, warn
from ..checkpoint import Checkpoints
from ..distributed import to_host
from ..plan import AnyPlan, Cores
from ..plan._engine import as_plan, plan_in_program
from ..sharding._engine import shard_members
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
from ._group_run import GroupRun, fit_parts
from ._options import Stopping, check_checkpoint, check_options, limits_of
from ._revive import Revive
from ._run import Run
from ._scan_steps import FitOptions
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
from .host._start import layout_of, start_of, with_validation
from .resume._identity import identity, optimiser_step
from .resume._resume import Saver


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


@overload
def fit(
    ensemble: Ensemble[M] | TrainState[M] | Run[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Iterable[PyTree],
    **options: Unpack[FitOptions],
) -> Run[M]: ...
@overload
def fit(ensemble: Group | GroupRun, loss: Any, optimiser: Any, data: Any, *, key: Any, **options: Any) -> GroupRun: ...
@explain_as("fit")
def fit(  # pyright: ignore[reportInconsistentOverload]  # options of groups are not listed
    ensemble: Ensemble[M] | TrainState[M] | Run[M] | Group | GroupRun,
    loss: ByPart[Callable[..., Any]],
    optimiser: ByPart[Optimiser],
    data: PyTree | Iterable[PyTree],
    *,
    epochs: ByPart[int | None] = None,
    steps: ByPart[int | None] = None,
    batch_size: ByPart[int | None] = None,
    validation: PyTree = None,
    patience: ByPart[int | None] = None,
    stop: ByPart[Stopping | None] = None,
    state: ByPart[eqx.nn.State | None] = None,
    hyper: PyTree = None,
    rows: Any = None,
    shuffle: Shuffle = True,
    has_aux: bool = False,
    history: Literal["all", "last"] | int = "all",
    trainable: Trainable = eqx.is_inexact_array,
    on_diverge: ByPart[Literal["freeze", "revive", "raise"] | Revive] = "freeze",
    plan: ByPart[AnyPlan] = None,
    mesh: Mesh | None = None,
    checkpoint: ByPart[str | os.PathLike[str] | Checkpoints | None] = None,
    progress: bool | None = None,
    callbacks: ByPart[Callback | Sequence[Callback] | None] = None,
    key: Any,
) -> Run[M] | GroupRun:
    """Trains all members of an ensemble; each becomes the model that training it alone would give.

    Loss and optimiser are written for ONE member. Chunks of many steps run as one compiled program. Each member has its
    own gradient, optimiser state, patience and status. Further calls with the same loss and optimiser objects and the
    same shapes reuse the compiled program: define these objects once.

    **Arguments:**

    - `ensemble`: the ensemble to train; it is not modified. A training state or a run continues from its last step,
        with its own `state` and `hyper`: with the same key, data and batch size, two runs equal one of their total
        length, up to the rounding of a program compiled for another length. If the first run ends within an epoch, it
        is also validated there, which may find better weights but stops no member. The parts of a group are trained
        one after another: [below](#eqx_ensemble.GroupRun).
    - `loss`: `loss(model, batch, key) -> value` of one member on one batch `(batch, ...)`; for stateful members
        `loss(model, state, batch, key) -> (value, state)`. A parameter named `hyper` receives the member's
        hyper-parameters. If the loss combines predictions `(batch, 1)` with targets `(batch,)`, a warning names the
        line, because all pairs would be compared; axes that the loss adds itself (`y[:, None]`, `keepdims`) are
        accepted.
    - `optimiser`: an optax optimiser; with `hyper`, a function of a member's hyper-parameters that returns one; or
        [`eqx_ensemble.train.Together`][], which also trains shared leaves.

    *Data:*

    - `data`: a PyTree of arrays `(rows, ...)` shared by all members, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][]; or an [`eqx_ensemble.train.RowReader`][], which reads rows on demand; or an iterable of
        batches (a generator, a loader of torch or grain), iterated once per epoch. A generator cannot restart: it
        supports one epoch, or as many `steps` as it has batches. Data frames and tensors are accepted; masked NaN too.
    - `batch_size`: rows per step. By default 32; all rows if they are fewer. The last batch of an epoch may be
        smaller.
    - `rows`: row indices `(members, n)` into `data`, such as bootstraps, folds or subsets.
    - `shuffle`: `True`: every member has its own row order; `"shared"`: all members share one row order, which is
        faster; `False`: the order of the data. The other two are a fresh permutation in every epoch, which the
        compiled step computes on the fly and never stores: [row orders](../same-results.md#row-orders).
    - `validation`: arrays as for `data`, in memory, scored by the loss; or [`eqx_ensemble.train.Validation`][], which
        has a score of its own. They are scored as one batch in inference mode at the end of every epoch. If `stop`, a
        callback or the end of the run stops a member within an epoch, its last weights are scored as well. A continued
        run scores its best weights again. Warnings name NaN scores and training data.

    *Length:*

    - `epochs` or `steps`: the length of the run, without earlier runs. The rest of an iterator's epoch counts as one.

    *Stopping:*

    - `patience`: a member stops after this many epochs in which its validation score did not improve.
    - `stop`: [`eqx_ensemble.train.Stopping`][]: members stop at a validation score, or after a number of steps or some
        time.

    *Members:*

    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, a PyTree of arrays `(members, ...)`. Unless `data` is an iterable, a warning lists
        those that neither the optimiser nor a loss uses and that members were not built with.
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs; the history holds them.
    - `history`: the steps whose losses and auxiliary outputs are recorded: `"all"`; with an int `n`, every `n`-th and
        the last; or only the `"last"`. [The others do not leave the device](../scale.md#a-thinner-history).
    - `trainable`: which leaves of a member are trained, as in [`eqx_ensemble.train.init`][]. Numbers of
        `build(zip=...)`, such as dropout rates, are trained only if it selects them.
    - `on_diverge`: what to do if a loss or weights are not finite (`jax_debug_nans`, `jax_debug_infs` have no effect).
        `"freeze"`: the member keeps its last finite weights, the others continue, and a warning names it at the end;
        `"revive"`: it continues as a copy of a healthy member, or with [`eqx_ensemble.train.Revive`][] from a new
        initialisation; `"raise"`: the run ends with [`eqx_ensemble.train.DivergedError`][], which holds the run so far.

    *Running:*

    - `plan`: how the members are executed. By default [`eqx_ensemble.plan.Cores`][]: in blocks on all cores of a CPU;
        elsewhere [`eqx_ensemble.plan.Vmap`][]. `"auto"` measures plans while it trains: [`eqx_ensemble.plan.Auto`][].
        With `scan=False`, such as in `ee.plan.Vmap(scan=False)`, each step is its own compiled call:
        [`eqx_ensemble.plan.AbstractPlan`][].
    - `mesh`: the devices to train on, from [`eqx_ensemble.make_mesh`][]; by default the mesh that the ensemble was
        built on. Members are sharded over its axis `members`, the rows of their batches over `data`; results agree
        within rounding. [How it works](../scale.md).
    - `progress`: whether to show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `callbacks`: a function of one [`eqx_ensemble.train.Progress`][], or a list of them, called between chunks of
        steps, about once a second (more often with `patience` or `stop`), and at the end. It returns `None`, `True` to
        end the run, or booleans `(members,)` to stop members: [`eqx_ensemble.train.Callback`][]. Reproducible decisions
        need a fixed number of steps between two calls: [`eqx_ensemble.train.every`][]. With several processes, all call
        theirs at the same steps, and the return values of the first process are used.
    - `key`: the root key. A member's random streams are derived from it and the member's id.

    *Saving:*

    - `checkpoint`: a folder to save the run in, or [`eqx_ensemble.checkpoint.Checkpoints`][]. Rerunning the same call
        resumes from the last good checkpoint, bit for bit, or returns the run if it is complete. A call with another
        loss, optimiser, ensemble, key, data or option raises an error that lists the differences; functions are
        compared by their traced programs, or by their code where they use concrete values. The length, `plan`, `mesh`,
        the `seconds` of `stop`, the callbacks and the options of `Checkpoints` may differ. The position of an iterator
        of batches is saved if it supports checkpointing (`get_state` or `state_dict`); other iterables are iterated
        again from the beginning, and must give the same batches. Only one run at a time can use a folder. Checkpoints
        are about a minute apart, or `Checkpoints(folder, every=)` steps.

    **Returns:** [`eqx_ensemble.Run`][]; for a group [`eqx_ensemble.GroupRun`][]. Ctrl-C, or a callback, ends the run at
    the next boundary and returns the run so far.

    **Raises:**

    - `TypeError` inside `jax.jit`, `jax.vmap` or `jax.grad`: use [`eqx_ensemble.train.make_step`][] or
        [`eqx_ensemble.map_members`][] there.
    - `TypeError`, `ValueError` or `IndexError`, before compiling, for arguments that do not fit together, validation
        data for which no score is finite, and integers that do not fit in 32 bits while 64-bit types are disabled.
    - `BlockingIOError`, naming process and machine, if another run trains in the checkpoint folder.
    - `FileNotFoundError` or `FileExistsError` if the folder contradicts the `resume` of `Checkpoints`; `ValueError` for
        another call.
    - `MemoryError`, with a smaller plan, if the device runs out of memory.
    - [`eqx_ensemble.train.DivergedError`][] with `on_diverge="raise"`.
    - [`eqx_ensemble.train.NotSavedError`][], which holds the run so far, if a checkpoint cannot be written.

    An error inside the loss, the score or the model gets a note with the function's location, the shapes of one
    member's arguments, and the likely cause. If the data, the loss, a callback or the device raise an error after the
    first step, the error's attribute `run` is the run so far (on one process only); with `checkpoint`, it is saved.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=2, key=key)
    ```

    ??? cite

        Row orders: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002); Mitchell, Stokes, Frank
        and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs" (2021; ACM Transactions on Parallel Computing, 2022).
    """
    if isinstance(ensemble, Group | GroupRun):
        return fit_parts(fit, ensemble, {name: value for name, value in locals().items() if name != "ensemble"})
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
    check_checkpoint(checkpoint)
    saver = None if checkpoint is None else Saver(checkpoint)
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
        here = identity(program, start, source.shapes(), validation, source.fingerprint, options)
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
