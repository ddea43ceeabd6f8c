import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int8

from .. import _axes, tree
from .._axes import check_rows_of_data
from .._caller import caller
from .._check import MemberMismatchError, is_traced, missing_extra_message
from .._ensemble import Ensemble, M, take_several
from .._foreign import from_foreign_tree
from .._predict import predict
from .._progress import members_in_words
from .._pytree import PyTree
from .._typing import CallableEnsemble, Out, StatefulEnsemble
from .._warnings import warn
from ..distributed import to_host
from ..plan import AbstractPlan
from ..resample import Folds, HeldOut, out_of_bag_mean, out_of_fold
from ..resample._engine import check_folds
from ._check_member import hyper_column_text
from ._check_run import check_no_state, check_run_weights, excluded_message
from ._ranking import rank_members
from ._revive import Revival, join_revived, renumber_revived, take_revived
from ._scan_steps import RunOf, RunWithCombine, RunWithoutCombine
from ._state import TrainState
from ._status import DivergedError, Status, status_names
from .compiled._selection import Mode, Selection
from .host._record import History, mean_of_last_epoch

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional: it is imported on drawing

# The text summary and the table of a run.

_MOST_IDS = 8  # in one line


def summary(run: "Run[Any]") -> str:
    """The members, statuses, best score, time and plan; `Run(...)` inside a compiled program."""
    if any(map(is_traced, jax.tree.leaves(run))):
        return "Run(...)"
    steps = int(run.train_state.step)
    lines = [f"Run of {members_in_words(len(run.status))}, {steps} {'step' if steps == 1 else 'steps'}"]
    lines[0] += ", interrupted" if run.interrupted else ""
    ids = np.asarray(run.ensemble.ids)
    lines.append(f"  status   {_statuses(run.status, ids)}")
    if run.revived:
        lines.append(f"  revived  {len(run.revived)} times")
    lines += _scores(run, ids)
    lines.append(f"  time     {run.seconds:.3g} s")
    lines.append(f"  plan     {run.plan!r}")
    return "\n".join(lines)


def _statuses(status: np.ndarray, ids: np.ndarray) -> str:
    parts = []
    for one in Status:
        here = ids[status == one]
        if len(here):
            parts.append(f"{len(here)} {one!s}" + ("" if one is Status.OK else f" ({_list_ids(here)})"))
    return ", ".join(parts)


def _list_ids(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:_MOST_IDS].tolist()))
    return f"id {shown}" + (", ..." if len(ids) > _MOST_IDS else "")


def _scores(run: "Run[Any]", ids: np.ndarray) -> list[str]:
    healthy, lines = run.status != Status.DIVERGED, []
    loss = mean_of_last_epoch(run.history, run.epoch)[healthy] if run.history.loss.size else np.zeros(0)
    loss = loss[np.isfinite(loss)]
    if loss.size:
        low, high = loss.min(), loss.max()
        lines.append(f"  loss     {low:.4g}" + ("" if low == high else f" to {high:.4g}"))
    if run.best_score is not None and run.best_step is not None and np.isfinite(run.best_score[healthy]).any():
        best = int(rank_members(run, 1)[0])
        lines.append(f"  best     {run.best_score[best]:.4g} by id {ids[best]} after {run.best_step[best]} steps")
    return lines


def table_columns(run: "Run[Any]") -> dict[str, np.ndarray]:
    """The columns of a run's table, one row per member."""
    columns = {"member": np.asarray(run.ensemble.ids)}
    for path, values in jax.tree_util.tree_flatten_with_path(run.train_state.hyper)[0]:
        columns[hyper_column_text(path)] = to_host(values)
    columns["loss"] = mean_of_last_epoch(run.history, run.epoch)
    if run.best_score is not None and run.best_step is not None:
        columns["validation"] = run.best_score
        columns["best_step"] = run.best_step
    columns |= {"status": status_names(run.status), "stopped_at": run.stopped_at}
    return columns


def data_frame(columns: dict[str, np.ndarray]) -> Any:
    """Columns as a `pandas.DataFrame`; a column of several numbers becomes several columns."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(missing_extra_message("Run.table(as_frame=True)", "pandas", "pandas")) from error
    flat = {}
    for name, values in columns.items():
        for index in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in index)] = values[:, *index]
    return pandas.DataFrame(flat)


def check_drawn_rows(drawn: Any, rows: Any) -> Any:
    """Raises if the training rows are unknown. Returns `drawn`, or else the `rows` passed to `fit`."""
    if drawn is None and rows is None:
        raise TypeError(
            "`Run.out_of_bag` needs the rows that the members were trained on: `fit` was called without `rows`.\n"
            "Pass their weights `(members, rows)` as `drawn`; without either, every member was trained on every row."
        )
    return rows if drawn is None else drawn


def check_fold_count(num_folds: int, num_members: int) -> None:
    """Raises unless there is one fold per member."""
    if num_folds != num_members:
        raise ValueError(f"`{caller()}` needs one fold per member, got {num_folds} folds and {num_members} members.")


def check_no_copies(revived: list[Any]) -> None:
    """Raises if a member became a copy of another, and so was trained on the rows of both."""
    copied = [event for event in revived if event.donor is not None]
    if copied:
        words = ", ".join(f"{event.member} of {event.donor}" for event in copied)
        raise ValueError(
            f"`{caller()}` cannot determine the training rows: diverged members were revived as copies of others "
            f"({words}), which were trained on other rows.\nRe-initialise diverged members, with "
            "`on_diverge=train.Revive(make)`, or freeze them."
        )


def check_rows_of_folds(num_rows: int, folds: Any, rows: Any) -> None:
    """Raises unless the folds match the data and no member was trained on rows of its test fold."""
    expected = folds.in_test.shape[1]
    if num_rows != expected:
        raise ValueError(f"`{caller()}` needs all rows of the data of the folds: expected {expected}, got {num_rows}.")
    if rows is None:
        return
    for member, (seen, tested) in enumerate(zip(np.asarray(rows), np.asarray(folds.in_test), strict=True)):
        if tested[seen].any():
            raise ValueError(
                f"`{caller()}` needs the folds that were passed to `fit`: the member at index {member} was trained on "
                f"{int(tested[np.unique(seen)].sum())} of its test rows."
            )


def check_healthy(run: "Run[Any]", *, strict: bool = False) -> np.ndarray:
    """Warns of diverged members, or raises if all are, or any if `strict`. Returns which are not."""
    healthy = run.status != Status.DIVERGED
    if not healthy.all():
        message = excluded_message(np.asarray(run.ensemble.ids)[~healthy], healthy)
        if strict or not healthy.any():
            raise DivergedError(message, run)
        warn(message)
    return healthy


def check_held_out_weights(run: "Run[Any]", weights: Any) -> np.ndarray | None:
    """Warns of diverged members, or raises if all are. Returns weights `(members,)`, zero for them; `None` if equal."""
    healthy = check_healthy(run)
    if healthy.all():
        return weights
    kept = np.zeros(len(healthy))
    given = np.ones(len(healthy)) if weights is None else weights
    kept[healthy] = check_run_weights(given, healthy, out_of_bag_mean)
    return kept


def check_same_plan(runs: Sequence["Run[Any]"]) -> AbstractPlan:
    """Raises unless runs were executed by one plan. Returns that of the first."""
    plans = [repr(run.plan) for run in runs]
    for i, plan in enumerate(plans):
        if plan != plans[0]:
            raise MemberMismatchError(
                f"`{caller()}` needs runs of one plan; run {i} differs from run 0.\n"
                f"  at `.plan`: expected {plans[0]}, got {plan}\nPass `plan={plans[0]}` to `fit` for both."
            )
    return runs[0].plan


class Run(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.fit`][].

    **Attributes:**

    - `ensemble`: the trained ensemble; with validation data, every member has its best weights, else its last.
    - `state`: the stacked `equinox.nn.State` of these members; `None` for stateless members.
    - `history`: the curves, an [`eqx_ensemble.train.History`][].
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    - `stopped_at`: `(members,)`, the step at which a member stopped or diverged; -1 for the others.
    - `fault`: `(members,)`, the first non-finite value of a diverged member: `"loss"` or the path of a weight.
    - `revived`: the revivals of diverged members, in order, each an [`eqx_ensemble.train.Revival`][].
    - `best_step`, `best_score`: `(members,)`, each member's best validation score and its step (infinity and -1 if
        there was none); `None` without validation data.
    - `train_state`: the last training state, for [`eqx_ensemble.fit`][] or [`eqx_ensemble.train.make_step`][].
    - `selection`: each member's best weights and the number of epochs since then; `None` without validation data.
    - `rows`: the `rows` of `fit`, `(members, n)`, or `None`.
    - `data_state`: the position of an iterator that supports checkpointing.
    - `plan`: how the members were executed; `run.plan.explain()` says why.
    - `interrupted`: whether Ctrl-C or a callback ended the run early.
    - `seconds`: the duration, including compilation and the runs that it continues.
    - `epoch`: the number of steps of an epoch; `None` if an iterable gave the batches.

    [`eqx_ensemble.concatenate`][] joins runs.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key)
    data = x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    rows = ee.resample.bootstrap(len(x), 8, key=key)
    run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=2, rows=rows, validation=data, key=key)
    run.history.loss.shape, run.history.validation.shape  # (8, 8), (8, 2)
    run.predict(x, combine=ee.combine.mean).shape  # (100, 1)
    run.out_of_bag(x).mean.shape  # (100, 1)
    run.best(3).ids  # (3,)
    ```
    """

    ensemble: Ensemble[M]
    state: PyTree
    history: History
    status: Int8[np.ndarray, " members"]
    stopped_at: Int[np.ndarray, " members"]
    fault: np.ndarray
    revived: list[Revival] = eqx.field(
        metadata=_axes.follows(join_revived, take=take_revived, renumber=renumber_revived)
    )
    best_step: Int[np.ndarray, " members"] | None
    best_score: Float[np.ndarray, " members"] | None
    train_state: TrainState[M]
    selection: Selection | None
    rows: Int[np.ndarray, "members n"] | None
    data_state: Any = eqx.field(metadata=_axes.SHARED)
    plan: AbstractPlan = eqx.field(metadata=_axes.follows(check_same_plan))
    interrupted: bool = eqx.field(metadata=_axes.follows(lambda runs: any(run.interrupted for run in runs)))
    seconds: float = eqx.field(metadata=_axes.follows(lambda runs: max(run.seconds for run in runs)))
    epoch: int | None = eqx.field(metadata=_axes.SHARED)

    def __getitem__(self, index: Any) -> "Run[M]":
        """A smaller run for a slice, a list of integers or a mask, which `fit` continues."""
        return take_several(self, index, "run")

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(summary(self))}</pre>"

    @property
    def healthy(self) -> Ensemble[M]:
        """The trained ensemble without the members that diverged."""
        kept = self.status != Status.DIVERGED
        return self.ensemble if kept.all() else self.ensemble[kept]

    @overload
    def predict(
        self: RunOf[StatefulEnsemble[tuple[Out, eqx.nn.State]]],
        x: PyTree,
        *,
        fn: None = None,
        **options: Unpack[RunWithoutCombine],
    ) -> Out: ...
    @overload
    def predict(
        self: RunOf[CallableEnsemble[Out]], x: PyTree, *, fn: None = None, **options: Unpack[RunWithoutCombine]
    ) -> Out: ...
    @overload
    def predict(
        self, x: PyTree, *, fn: Callable[..., tuple[Out, eqx.nn.State]], **options: Unpack[RunWithoutCombine]
    ) -> Out: ...
    @overload
    def predict(self, x: PyTree, *, fn: Callable[..., Out], **options: Unpack[RunWithoutCombine]) -> Out: ...
    @overload
    def predict(self, x: PyTree, *, combine: Callable[..., Out], **options: Unpack[RunWithCombine]) -> Out: ...
    def predict(
        self,
        x: PyTree,
        *,
        combine: Callable[..., Any] | None = None,
        weights: Any = None,
        strict: bool = False,
        **options: Any,
    ) -> PyTree:
        """Predicts with the members that did not diverge; a warning names those that did.

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][]; the members' state is that of the run.
        - `combine`: combines the predictions of all members, such as [`eqx_ensemble.combine.mixture`][].
        - `weights`: for `combine`, one weight for each member `(members,)`; those of diverged members are ignored.
        - `strict`: raise [`eqx_ensemble.train.DivergedError`][] instead of excluding members.

        **Returns:** the predictions, each array `(healthy members, rows, ...)`; with `combine`, its result.

        **Raises:** [`eqx_ensemble.train.DivergedError`][] if all members diverged.
        """
        weights = check_run_weights(weights, self.status != Status.DIVERGED, combine)
        healthy = check_healthy(self, strict=strict)
        state = self.state if self.state is None or healthy.all() else tree.take(self.state, healthy)
        return predict(self.healthy, x, combine=combine, weights=weights, state=state, **options)

    def out_of_bag(self, x: PyTree, drawn: Any = None, *, weights: Any = None, **options: Any) -> HeldOut:
        """Predicts every row of the training data with the members that were not trained on it.

        **Arguments:**

        - `x`: the inputs: all rows of the training data, in their order.
        - `drawn`: as for [`eqx_ensemble.resample.out_of_bag`][]; by default the `rows` that were passed to `fit`.
        - `weights`: convex weights over members `(members,)`.
        - `options`: as for [`eqx_ensemble.predict`][]. Average class probabilities, not logits:
            `fn=lambda model, x: jax.nn.softmax(model(x))`.

        **Returns:** [`eqx_ensemble.resample.HeldOut`][]. Diverged members are excluded; a warning names them.

        **Raises:** `TypeError` if the rows are not known; `ValueError` if a member became a copy of another.
        """
        drawn = check_drawn_rows(drawn, self.rows)
        check_no_copies(self.revived)
        weights = check_held_out_weights(self, weights)
        return out_of_bag_mean(predict(self.ensemble, x, state=self.state, **options), drawn, weights=weights)

    def out_of_fold(self, x: PyTree, folds: Folds, *, weights: Any = None, **options: Any) -> HeldOut:
        """Predicts every row with the members that have it in their test fold.

        **Arguments:**

        - `x`, `weights`, `options`: as for [`eqx_ensemble.Run.out_of_bag`][].
        - `folds`: the folds that the members were trained on: `fit(..., rows=folds.train)`.

        **Returns:** [`eqx_ensemble.resample.HeldOut`][]; see [`eqx_ensemble.methods.cross_fit`][] for an example.

        **Raises:** `ValueError` if the folds do not match, or if a member became a copy of another.
        """
        check_folds(folds)
        check_fold_count(folds.test.shape[0], len(self.status))
        check_no_copies(self.revived)
        x = from_foreign_tree(x, "x")
        num_rows = check_rows_of_data(x, len(self.status), argument="x", finite=False)
        check_rows_of_folds(num_rows, folds, self.rows)
        weights = check_held_out_weights(self, weights)
        of_each = lambda x: jax.vmap(lambda x, rows: x[rows])(jnp.asarray(x), folds.test)
        own = lambda value: _axes.Each(jax.tree.map(of_each, value))
        own_rows = _axes.map_each(own, x, shared=lambda x: _axes.Each(jnp.asarray(x)[folds.test]))
        tested = predict(self.ensemble, own_rows, state=self.state, **options)
        return out_of_fold(tested, folds, rows="test", weights=weights)

    @property
    def hyper(self) -> PyTree:
        """The hyper-parameters with which members were trained last, a tree of arrays `(members, ...)`, or `None`."""
        return self.train_state.hyper

    @property
    def mode(self) -> Mode:
        """Whether lower (`"min"`) or higher (`"max"`) validation scores are better: the `mode` of its `Validation`."""
        return "min" if self.selection is None else self.selection.mode

    def best(self, count: int = 1, *, by: Any = None, mode: Mode | None = None) -> Ensemble[M]:
        """The best members, best first, without diverged ones.

        **Arguments:**

        - `count`: the number of members.
        - `by`: a score for each member `(members,)`; by default `best_score`.
        - `mode`: `"min"` if lower scores are better, `"max"` if higher. Required with `by`.

        **Returns:** the ensemble of these members.

        **Raises:** `TypeError` without scores, and for stateful members: use `ranking`. `ValueError` if fewer than
        `count` members have a score.
        """
        check_no_state(self.state)
        return self.ensemble[rank_members(self, count, by, mode)]

    def ranking(self, count: int | None = None, *, by: Any = None, mode: Mode | None = None) -> Int[np.ndarray, " n"]:
        """The positions of the best members `(count,)`, best first, without diverged ones.

        `run[run.ranking(3)]` is the run of the three best members, with their `hyper` and `state`.

        **Arguments**, **Raises:** as [`eqx_ensemble.Run.best`][]; without `count`, all that have a score are ranked.
        """
        return rank_members(self, count, by, mode)

    def plot(self, *, stride: int | None = None, unit: str | None = None) -> Figure:
        """A figure of the run: training curves, validation scores, and the final scores against each hyper-parameter.

        Scores are the best validation scores, or else the training losses of the last epoch.

        **Arguments:**

        - `stride`: the number of steps averaged for one point; by default for about 100 points.
        - `unit`: the unit of the loss and of the score, such as `"nats"`.

        **Returns:** the matplotlib Figure: `run.plot().savefig("run.png")`.

        **Raises:** `ImportError` without matplotlib (extra `plot`); `ValueError` if no loss is finite.
        """
        from ..plot._engine import figure_of_run

        return figure_of_run(self, stride=stride, unit=unit)

    def table(self, *, as_frame: bool = False) -> Any:
        """A table of one row per member: id, hyper-parameters, scores, status.

        **Arguments:**

        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`), with one number in each column.

        **Returns:** a dict from column names to arrays `(members, ...)`, or a data frame. `loss` is each member's mean
        over the recorded steps of its last epoch, or its last loss if the batches came from an iterable.
        """
        columns = table_columns(self)
        return data_frame(columns) if as_frame else columns
