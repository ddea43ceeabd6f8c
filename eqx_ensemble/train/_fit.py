import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import _check
from .._axes import Each
from .._ensemble import Ensemble, M
from ..checkpoint import Checkpoints
from ..distributed import to_host
from ..plan import AnyPlan
from ..plan._auto import as_plan
from ..sharding._check import warn_of_uneven_rows
from ..sharding._layout import Layout
from ..sharding._shard import shard_members
from ._errors import DivergedError, NotSavedError
from ._revive import Revive
from ._run import Run
from ._state import TrainState
from ._status import Status
from ._trainable import Trainable
from .compiled._limits import make_limits, stop_at_limits
from .compiled._loss import Loss, as_loss
from .compiled._optimiser import Optimiser
from .compiled._program import Program
from .compiled._select import match_dtype
from .compiled._selection import Mode
from .data._arrays import ArraySource
from .data._batches import IterableSource
from .data._cursor import Length
from .data._data import as_row_indices, is_batches, on_device, without_marks
from .data._rows import ORDERS, Order, row_order
from .host._execute import execute
from .host._start import Start, layout_of, start_of
from .resume._identity import identity
from .resume._resume import Saver


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
    score: Callable[..., Any] | None = None,
    mode: Mode = "min",
    patience: int | None = None,
    min_delta: float = 0.0,
    target: Any = None,
    max_steps: Any = None,
    max_seconds: Any = None,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    rows: Any = None,
    order: Order = "each",
    has_aux: bool = False,
    trainable: Trainable = eqx.is_inexact_array,
    on_diverge: Literal["freeze", "revive", "raise"] | Revive = "freeze",
    plan: AnyPlan = None,
    scan: bool | None = None,
    mesh: Mesh | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    progress: bool | None = None,
    key: Any,
) -> Run[M]:
    """Trains all members; each ends as the model that you would have got by training it alone.

    Loss and optimiser are written for ONE member. Whole chunks of steps run as one compiled program; gradient,
    optimiser, patience and faults stay with their member. Another fit with the same loss and optimiser objects and the
    same shapes compiles nothing: keep them in variables.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=2, key=key)
    run.ensemble, run.history.loss, run.status
    ```

    **Arguments:**

    - `ensemble`: what to train; it stays as it is. A training state or a run goes on from where it stands, with its
        own `state` and `hyper`: with the same key, data and batch size, two runs equal one of their sum, up to the
        rounding of a program compiled for another length. Where the first ends within an epoch it is validated
        there, too, which may find better weights and stops no member.
    - `loss`: `loss(model, batch, key) -> value` of one member on one batch `(batch, ...)`; for stateful members
        `loss(model, state, batch, key) -> (value, state)`. A parameter named `hyper` receives the member's own. When
        predictions `(batch, 1)` meet targets `(batch,)`, all pairs would be compared: a warning names the line. Axes
        that the loss writes itself (`y[:, None]`, `keepdims`) are taken as meant.
    - `optimiser`: an optax optimiser; with `hyper`, a function of a member's hyper-parameters that makes one.
    - `data`: any PyTree of arrays `(rows, ...)` shared by all members, parts marked [`eqx_ensemble.Each`][] being
        `(members, rows, ...)`; or an iterable of batches (a generator, a loader of torch or grain), iterated once an
        epoch, of which the next is fetched while the device works on the last. What can be iterated only once, as a
        generator, makes one epoch, or any number of `steps`.
    - `epochs` or `steps`: the length of the run; of what is added to a run that goes on, where the rest of an
        iterator's epoch counts as one.
    - `batch_size`: rows per step; the last batch of an epoch may be smaller and is exact. 32 if not given, or all
        rows if they are fewer.
    - `validation`: like `data`, scored as one batch in inference mode at the end of every epoch. The weights of a
        member that `max_steps` or `max_seconds` stopped, or the run's end, within an epoch are scored, too.
    - `score`: called like `loss`; the loss if not given.
    - `mode`: `"min"` where a lower score is better, `"max"` where a higher one is, such as an accuracy.
    - `patience`: a member stops after this many epochs without an improvement of more than `min_delta`, which is not
        negative.
    - `target`: a member stops at the end of the epoch whose validation score is as good: not above it, or not below it
        with `mode="max"`; one number, or one each `(members,)`.
    - `max_steps`, `max_seconds`: a member stops after so many steps (of all its runs), or at the end of the chunk
        (about a second) in which so much time has passed since the call; one number, or one each `(members,)`.
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, any PyTree of arrays `(members, ...)`.
    - `rows`: row indices `(members, n)` into `data`: a bootstrap, a fold, a subset of a member's own.
    - `order`: `"each"`: every member has a row order of its own; `"shared"`: one order for all, which shares each
        batch and is faster; `"given"`: the order of the data.
    - `has_aux`: the loss returns auxiliary outputs after its other outputs; they are reported in the history.
    - `trainable`: which leaves of a member are trained, as in [`eqx_ensemble.train.init`][]; not the numbers (dropout
        rates) of `build(zip=...)`, unless it asks for them.
    - `on_diverge`: what becomes of a member whose loss or weights stop being finite (`jax_debug_nans` is not asked).
        `"freeze"`: it keeps its last good weights, the others go on, and a warning names it at the end; `"revive"`: it
        goes on as a copy of a healthy member, and [`eqx_ensemble.train.Revive`][] lets it start afresh; `"raise"`: the
        run ends and raises [`eqx_ensemble.train.DivergedError`][], which holds the run so far.
    - `plan`: how the members are executed; `eqx_ensemble.plan.Vmap()` if not given. `"auto"` tries what makes sense
        for the program while it trains: [`eqx_ensemble.plan.Auto`][].
    - `scan`: for data in arrays: whether many steps run in one compiled loop (`True`), each step as a compiled call of
        its own (`False`), or as the step suggests (`None`): XLA's convolutions are many times slower inside a compiled
        loop on a CPU, everything else is faster there. Under [`eqx_ensemble.plan.Sequential`][] a step outside a loop
        is one compiled call for each member.
    - `mesh`: the devices to train on, from [`eqx_ensemble.make_mesh`][]; where an ensemble was built on a mesh, that
        one. Members are spread over its axis `members`, the rows of their batches over `data`; the results agree within
        rounding. [How it works](../scale.md).
    - `checkpoint`: a folder to save the run in, or [`eqx_ensemble.checkpoint.Checkpoints`][]. The same call then goes
        on where the last good checkpoint stands, bit for bit, whatever ended it; a run that is finished comes back at
        once. Another loss, optimiser, ensemble, key, data or option is an error that lists what differs, with both
        values where they are short; functions are compared by what they compute, or by their code where they look at
        values. The length, `plan`, `scan`, `mesh`, `max_seconds` and how often to save may be changed. Iterators of
        batches are saved where they stand, if they say that (`get_state` or `state_dict`); other iterables are drawn
        again from their beginning, and have to give the same batches. One run at a time has a folder, which is made
        before anything is compiled.
    - `checkpoint_every`: steps between two checkpoints; about a minute if not given. There is one at the end too.
    - `resume`: `"auto"`: go on if there is a checkpoint; `"must"`: else raise an error; `"never"`: raise one if there
        is.
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: the root key. A member's streams follow from it and the member's id.

    **Returns:** [`eqx_ensemble.Run`][]. Ctrl-C ends the run at the next boundary and returns what there is.

    **Raises:** TypeError inside `jax.jit`, `jax.vmap` or `jax.grad`, where [`eqx_ensemble.train.make_step`][] and
    [`eqx_ensemble.map_members`][] are the way; before anything is compiled, for arguments that do not fit together,
    data that are not finite, or integers that jax would wrap around because 64-bit types are switched off;
    BlockingIOError, which names process and machine, when another run trains in the checkpoint folder; and
    [`eqx_ensemble.train.NotSavedError`][], which holds the run so far, when a checkpoint cannot be written. An error
    inside the loss, the score or the model has a note with the function's place, the shapes of one member's arguments,
    whether it ran in training or validation, and the likely cause. Once a step is done, any error of the data, the loss
    or the device ends the run as it is, with the run so far as its attribute `run` (not with several processes); with
    `checkpoint`, that is saved.
    """
    _check.no_transformation(name="fit")
    plan = as_plan(plan)
    lengths = {"epochs": epochs, "steps": steps, "patience": patience}
    how = Revive() if isinstance(on_diverge, str) and on_diverge == "revive" else on_diverge
    _check.check_flag(has_aux, "has_aux", name="fit")
    _check.check_optional_flag(progress, "progress", name="fit")
    _check.check_optional_flag(scan, "scan", name="fit")
    _check.check_optional_function(score, "score", name="fit", example="lambda model, batch, key: ...")
    scoring = {"validation": validation, "score": score, "mode": mode, "min_delta": min_delta, "target": target}
    _check.fit_options(order, ORDERS, on_diverge=how, **scoring, **lengths)
    if is_batches(data):
        _check.one_pass_only(data, epochs)
    _check.checkpoint_options(checkpoint, (str, os.PathLike, Checkpoints), checkpoint_every, resume)
    saver = None if checkpoint is None else Saver(checkpoint, every=checkpoint_every, resume=resume)
    has_validation = validation is not None
    layout = layout_of(mesh, ensemble)
    start = start_of(
        ensemble, optimiser, state=state, hyper=hyper, trainable=trainable, layout=layout,
        has_validation=has_validation, mode=mode, key=key,
    )  # fmt: skip
    first = start.state
    limits = make_limits(max_steps, target, first.num_members, min_delta=float(min_delta))
    limits = limits if layout is None else shard_members(limits, layout)
    max_seconds = _check.limit(max_seconds, "max_seconds", first.num_members, name="fit")
    losses = _losses(first, loss, score, has_aux=has_aux, has_validation=has_validation)
    if validation is not None:
        if score is None and not is_batches(data):
            _check.same_structure(without_marks(validation), without_marks(data))
        validation, _ = on_device(validation, first.num_members, argument="validation", name="fit", layout=layout)
        assert start.selection is not None
        assert losses[1] is not None
        start = start._replace(selection=match_dtype(losses[1], start.selection, first, validation))
    own_rows = order == "each" or rows is not None
    patience = None if patience is None else int(patience)  # of NumPy's kinds too
    program = Program(
        losses[0], optimiser, plan, layout, losses[1], patience, own_rows=own_rows, halts=isinstance(how, Revive)
    )
    if first.fixed.hyper is not None:
        _check.used_hyper(optimiser, wants_hyper=any(fn is not None and fn.wants_hyper for fn in losses), name="fit")
    source = _source(data, start, rows=rows, order=order, batch_size=batch_size, scan=scan, layout=layout, key=key)
    if saver is not None:
        options = {"key": key, "max_steps": max_steps, "target": target, "on_diverge": how}
        options |= {"min_delta": float(min_delta), "mode": mode}
        here = identity(program, start, source.shapes(), validation, source.fingerprint, options)
        program = dataclasses.replace(program, traced=here.programs)
        start = saver.resumed(start, here)
    if saver is None or saver.step < 0:  # a run that was saved may have ended
        training = to_host(stop_at_limits(first.moving, limits, first.step).status) == Status.OK
        _check.goes_on(training, ids=to_host(first.ids))
    length = Length(int(first.step), *(None if given is None else int(given) for given in (epochs, steps)))
    lost_before = to_host(first.moving.status) == Status.DIVERGED
    run = execute(
        program, start, source, length, limits=limits, validation=validation, on_diverge=how, lost_before=lost_before,
        max_seconds=max_seconds, saver=saver, progress=progress, key=key,
    )  # fmt: skip
    if saver is not None and saver.failed is not None:
        raise NotSavedError(saver.failed, run) from saver.failed
    lost = run.status == Status.DIVERGED
    if lost.any():
        integers = [] if is_batches(data) else _check.integers_in(data, Each)
        where = (to_host(first.ids)[lost], run.stopped_at[lost], run.fault[lost])
        message = _check.diverged(*where, first_step=length.begun, integers=integers)
        if how == "raise" and (lost & ~lost_before).any():
            raise DivergedError(message, run)
        warnings.warn(message, stacklevel=2)
    return run


def _source(
    data: PyTree | Iterable[PyTree],
    start: Start,
    *,
    rows: Any,
    order: Order,
    batch_size: int | None,
    scan: bool | None,
    layout: Layout | None,
    key: Any,
) -> ArraySource | IterableSource:
    """Where a run's batches come from."""
    num_members = start.state.num_members
    if is_batches(data):
        _check.no_array_options(batch_size=batch_size, rows=rows, order=order, scan=scan, name="fit")
        return IterableSource(data, num_members, layout)
    data, num_rows = on_device(data, num_members, argument="data", name="fit", layout=layout, whole=True)
    rows = as_row_indices(rows, num_members, num_rows, name="fit")
    own_order = row_order(key, start.state.ids, order, num_rows, rows)
    source = ArraySource(data, own_order, batch_size=batch_size, scan=scan)
    if layout is not None:
        warn_of_uneven_rows(source.batch_size, layout.row_parts)
    return source


def _losses(
    first: TrainState,
    loss: Callable[..., Any],
    score: Callable[..., Any] | None,
    *,
    has_aux: bool,
    has_validation: bool,
) -> tuple[Loss, Loss | None]:
    """The loss, and the score if there is something to judge."""
    options = {"stateful": first.model_state is not None, "hyper": first.fixed.hyper, "name": "fit"}
    loss_of_one = as_loss(loss, has_aux=has_aux, **options)
    if not has_validation:
        return loss_of_one, None
    return loss_of_one, as_loss(score or loss, has_aux=has_aux and score is None, purpose="in validation", **options)
