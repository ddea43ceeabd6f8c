import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check
from .._ensemble import Ensemble, M
from .._progress import members_in_words, progress_line
from ..plan import AbstractPlan, AnyPlan
from ..plan._auto import as_plan
from ..plan._pilot import Pilot, explained_memory
from ._arrays import run_arrays
from ._data import chosen_rows, is_batches, on_device, unmarked
from ._health import place_of_fault
from ._interrupt import Interruption
from ._loop import Loop, OnDiverge, run_batches
from ._loss import as_loss
from ._optimiser import Optimiser
from ._program import Carry, Inputs, Program
from ._roster import Roster
from ._rows import ORDERS, Order, row_order
from ._run import DivergedError, Record, Run, status_names
from ._select import no_selection
from ._state import DIVERGED, STATUS_NAMES, TrainState, first_state


def fit(
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Iterable[PyTree],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    validation: PyTree = None,
    score: Callable[..., Any] | None = None,
    patience: int | None = None,
    min_delta: float = 0.0,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    rows: Any = None,
    order: Order = "each",
    has_aux: bool = False,
    trainable: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    on_diverge: OnDiverge = "freeze",
    plan: AnyPlan = None,
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

    - `ensemble`: what to train; it stays as it is.
    - `loss`: `loss(model, batch, key) -> value` of one member on one batch `(batch, ...)`; for stateful members
        `loss(model, state, batch, key) -> (value, state)`. A parameter named `hyper` receives the member's own.
    - `optimiser`: an optax optimiser; with `hyper`, a function of a member's hyper-parameters that makes one.
    - `data`: any PyTree of arrays `(rows, ...)` shared by all members, parts marked [`eqx_ensemble.Each`][] being
        `(members, rows, ...)`; or an iterable of batches, iterated once an epoch.
    - `epochs` or `steps`: the length of the run.
    - `batch_size`: rows per step; the last batch of an epoch may be smaller and is exact. 32 if not given, or all
        rows if they are fewer.
    - `validation`: like `data`, scored as one batch in inference mode at the end of every epoch.
    - `score`: called like `loss`, lower is better; the loss if not given.
    - `patience`: a member stops after this many validations without an improvement of more than `min_delta`.
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, any PyTree of arrays `(members, ...)`.
    - `rows`: row indices `(members, n)` into `data`: a bootstrap, a fold, a subset of a member's own.
    - `order`: `"each"`: every member has a row order of its own; `"shared"`: one order for all, which shares each
        batch and is faster; `"given"`: the order of the data.
    - `has_aux`: the loss returns auxiliary outputs after its other outputs; they are reported in the history.
    - `trainable`: which leaves of a member are trained, as in [`eqx_ensemble.train.init`][].
    - `on_diverge`: what becomes of a member whose loss or weights stop being finite. `"freeze"`: it keeps its last good
        weights, the others go on, and a warning names it at the end; `"raise"`: the run ends and raises
        [`eqx_ensemble.train.DivergedError`][], which holds the run so far.
    - `plan`: how the members are executed; `eqx_ensemble.plan.Vmap()` if not given. `"auto"` tries what makes sense
        for the program while it trains: [`eqx_ensemble.plan.Auto`][].
    - `progress`: show a progress line; by default on a terminal or in a notebook, after two seconds.
    - `key`: the root key. A member's streams follow from it and the member's id.

    **Returns:** [`eqx_ensemble.Run`][]. Ctrl-C ends the run at the next boundary and returns what there is.

    **Raises:** before anything is compiled, for arguments that do not fit together or data that are not finite.
    """
    plan = as_plan(plan)
    lengths = {"epochs": epochs, "steps": steps, "patience": patience}
    _check.fit_options(order, ORDERS, validation=validation, on_diverge=on_diverge, **lengths)
    first = first_state(ensemble, optimiser, state=state, hyper=hyper, trainable=trainable, name="fit", key=key)
    stateful = state is not None
    loss_of_one = as_loss(loss, stateful=stateful, has_aux=has_aux, hyper=hyper, name="fit")
    score_of_one = None
    if validation is not None:
        if score is None and not is_batches(data):
            _check.same_structure(unmarked(validation), unmarked(data))
        score_aux = has_aux and score is None
        score_of_one = as_loss(score or loss, stateful=stateful, has_aux=score_aux, hyper=hyper, name="fit")
        validation, _ = on_device(validation, first.num_members, argument="validation", name="fit")
    if hyper is not None:
        wants_hyper = loss_of_one.wants_hyper or (score_of_one is not None and score_of_one.wants_hyper)
        _check.used_hyper(optimiser, wants_hyper=wants_hyper, name="fit")
    own_rows = order == "each" or rows is not None
    program = Program(loss_of_one, score_of_one, optimiser, plan, patience, float(min_delta), own_rows)
    carry = Carry(first.moving, None if validation is None else no_selection(first.moving), first.step)
    record = Record()

    words = members_in_words(first.num_members)
    pilot = Pilot(plan, name="fit")
    with (
        Interruption() as interruption,
        progress_line(show=progress, description=words, unit="step") as line,
        explained_memory(pilot, first.num_members, name="fit"),
    ):
        if is_batches(data):
            _check.no_array_options(batch_size=batch_size, rows=rows, order=order, name="fit")
            inputs = Inputs(first.fixed, first.shared, None, validation)
            loop = Loop(program, pilot, Roster(carry, inputs), interruption, record, line, on_diverge)
            carry = run_batches(loop, inputs, carry, data, epochs=epochs, steps=steps)
        else:
            data, num_rows = on_device(data, first.num_members, argument="data", name="fit")
            rows = chosen_rows(rows, first.num_members, num_rows, name="fit")
            order_of_rows = row_order(key, first.ids, order, num_rows, rows)
            inputs = Inputs(first.fixed, first.shared, data, validation)
            loop = Loop(program, pilot, Roster(carry, inputs), interruption, record, line, on_diverge)
            carry = run_arrays(loop, inputs, carry, order_of_rows, batch_size=batch_size, epochs=epochs, steps=steps)
    run = _finished(first, loop.roster.whole(carry), record, plan, interrupted=interruption.requested)
    lost = run.status == STATUS_NAMES[DIVERGED]
    if lost.any():
        message = _check.diverged(np.asarray(first.ids)[lost], run.left[lost], run.fault[lost])
        if on_diverge == "raise":
            raise DivergedError(message, run)
        warnings.warn(message, stacklevel=2)
    return run


def _finished(first: TrainState[M], carry: Carry, record: Record, plan: AbstractPlan, *, interrupted: bool) -> Run[M]:
    last = TrainState(carry.moving, first.fixed, first.shared, first.ids, carry.step)
    moving, selection = carry.moving, carry.selection
    params, state, best_step, best_score = moving.params, moving.model_state, None, None
    if selection is not None:
        best_step, best_score = np.asarray(selection.step), np.asarray(selection.score)
        found = best_step >= 0
        params, state = jax.tree.map(
            lambda best, last: _axes.where_members(found, best, last),
            (selection.params, selection.model_state),
            (params, state),
        )
    status, left = np.asarray(moving.status), np.asarray(moving.left)
    ensemble = Ensemble(eqx.combine(params, first.fixed.frozen), first.shared, first.ids)
    faults = np.array([place_of_fault(fault, moving.params) for fault in np.asarray(moving.fault).tolist()])
    return Run(
        ensemble=ensemble,
        state=state,
        history=record.history(),
        status=status_names(status),
        left=left,
        fault=faults,
        best_step=best_step,
        best_score=best_score,
        train_state=last,
        plan=plan,
        interrupted=interrupted,
    )
