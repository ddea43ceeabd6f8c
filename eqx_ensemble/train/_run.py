from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int8

from .._check import MemberMismatchError, attribute_error
from .._ensemble import Ensemble, M, join, take
from .._leaves import is_traced
from .._progress import members_in_words
from .._pytree import PyTree
from .._table import table_of
from .._warnings import warn
from ..distributed import to_host
from ..tree._engine import check_index
from ._history import History, join_members, take_curves
from ._ranking import rank_members
from ._state import DivergedError, Status, TrainState, members_text, status_text, weights_of, with_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # matplotlib is optional: it is imported on drawing


# What other libraries call an attribute of a run.
_ELSEWHERE = {
    "run.history.loss": "loss losses train_loss train_losses metrics logs",
    "run.history.validation": "validation val_loss val_losses validation_loss scores",
    "run.train_state": "params parameters weights opt_state optimizer_state step steps epoch epochs",
    "run.ensemble": "model models members stacked num_members",
    "run.best()": "best_model best_models best_member best_ensemble",
    "run.hyper": "config configs hyperparameters hyperparams",
    "run[run.ranking(1)].hyper": "best_params",
    "run.predict(x, fn=lambda model, x: jax.nn.softmax(model(x)))": "predict_proba",
}


class Run(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.fit`][].

    `run[index]` is the run of some members, which `fit` continues, and [`eqx_ensemble.concatenate`][] joins runs.

    **Attributes:**

    - `ensemble`: the trained ensemble; with validation data, every member has its best weights, else its last.
    - `state`: the stacked `equinox.nn.State` of these members; `None` for stateless members.
    - `history`: the curves, an [`eqx_ensemble.train.History`][].
    - `train_state`: the last [`eqx_ensemble.train.TrainState`][], for [`eqx_ensemble.fit`][] or
        [`eqx_ensemble.train.make_step`][].
    - `rows`: the `rows` of `fit`, `(members, n)`, or `None`.
    - `mode`: whether lower (`"min"`) or higher (`"max"`) validation scores are better.
    - `interrupted`: whether Ctrl-C ended the run early.
    - `seconds`: the duration, including compilation and the runs that it continues.
    - `num_rows`: the rows of the training data; `None` for batches, and without data.

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
    run.best(3).num_members  # 3
    ```
    """

    ensemble: Ensemble[M]
    state: PyTree
    history: History
    train_state: TrainState[M]
    rows: Int[np.ndarray, "members n"] | None
    mode: Literal["min", "max"] = eqx.field(static=True)
    interrupted: bool = eqx.field(static=True)
    seconds: float = eqx.field(static=True)
    num_rows: int | None = eqx.field(static=True)

    @property
    def status(self) -> Int8[np.ndarray, " members"]:
        """The status of every member, int8, each an [`eqx_ensemble.train.Status`][]."""
        return to_host(self.train_state.status)

    @property
    def stopped_at(self) -> Int[np.ndarray, " members"]:
        """The step at which a member stopped or diverged; -1 for the others."""
        return to_host(self.train_state.stopped_at)

    @property
    def best_score(self) -> Float[np.ndarray, " members"] | None:
        """Each member's best validation score; infinite if none was defined, `None` without validation data."""
        return None if self.train_state.best is None else to_host(self.train_state.best_score)

    @property
    def best_step(self) -> Int[np.ndarray, " members"] | None:
        """The steps of each member at its best score, -1 if there was none; `None` without validation data."""
        return None if self.train_state.best is None else to_host(self.train_state.best_step)

    @property
    def hyper(self) -> PyTree:
        """The hyperparameters, a tree of arrays `(members, ...)`, or `None`."""
        return self.train_state.hyper

    @property
    def healthy(self) -> Ensemble[M]:
        """The trained ensemble without the members that diverged."""
        kept = self.status != Status.DIVERGED
        return self.ensemble if kept.all() else self.ensemble[kept]

    def __getitem__(self, index: Any) -> "Run[M]":
        index = np.atleast_1d(check_index(index, len(self.status)))
        own = take((self.ensemble, self.state, self.train_state, self.rows), index)
        history = take_curves(self.history, index)
        return Run(*own[:2], history, *own[2:], self.mode, self.interrupted, self.seconds, self.num_rows)

    @staticmethod
    def _join(runs: Sequence["Run[M]"]) -> "Run[M]":
        """The run of the members of several runs, in their order."""
        if len({run.mode for run in runs}) > 1:
            raise MemberMismatchError("`concatenate` needs runs with validation scores of one `mode`.")
        own = join([(run.ensemble, run.state, run.train_state, run.rows) for run in runs])
        history = join_members([run.history for run in runs])
        told = any(run.interrupted for run in runs), max(run.seconds for run in runs), runs[0].num_rows
        return Run(*own[:2], history, *own[2:], runs[0].mode, *told)

    def predict(
        self, x: PyTree, *, combine: Any = None, weights: Any = None, strict: bool = False, **options: Any
    ) -> PyTree:
        """Predicts with the members that did not diverge; a warning names those that did.

        **Arguments:**

        - `x`, `combine`, `options`: as for [`eqx_ensemble.predict`][]; the members' state is that of the run.
        - `weights`: for `combine`, one weight for each member `(members,)`; those of diverged members are ignored.
        - `strict`: raise [`eqx_ensemble.train.DivergedError`][] instead of excluding members.

        **Returns:** the predictions, each array `(healthy members, rows, ...)`; with `combine`, its result.

        **Raises:** [`eqx_ensemble.train.DivergedError`][] if all members diverged.
        """
        from .._predict import predict

        healthy = check_healthy(self, strict=strict)
        if weights is not None and np.shape(weights) == healthy.shape:
            weights = np.asarray(weights)[healthy]
        state = self.state if self.state is None or healthy.all() else take(self.state, healthy)
        return predict(self.healthy, x, combine=combine, weights=weights, state=state, **options)

    def out_of_bag(self, x: PyTree, unseen: Any = None, *, weights: Any = None, **options: Any) -> Any:
        """Predicts every row of the training data with the members that were not trained on it.

        **Arguments:**

        - `x`: the inputs: all rows of the training data, in their order.
        - `unseen`: as for [`eqx_ensemble.resample.held_out_mean`][]; by default those outside the `rows` of `fit`.
        - `weights`: convex weights over members `(members,)`.
        - `options`: as for [`eqx_ensemble.predict`][]. Average class probabilities, not logits:
            `fn=lambda model, x: jax.nn.softmax(model(x))`. Of several outputs take one:
            `fn=lambda model, x: model(x)[0]`.

        **Returns:** [`eqx_ensemble.resample.HeldOut`][]. Diverged members are excluded; a warning names them.

        **Raises:** `TypeError` if the rows are not known, or for several outputs; `ValueError` for another number of
            rows.
        """
        from .._predict import predict
        from ..resample import held_out_mean, out_of_bag

        if unseen is None and self.rows is None:
            raise TypeError(
                "`Run.out_of_bag` needs the rows that the members were trained on: `fit` was called without `rows`.\n"
                "Pass `unseen`, `(members, rows)`; without either, every member saw every row."
            )
        own = healthy_weights(self, weights)
        predictions = predict(self.ensemble, x, state=self.state, **options)
        if isinstance(predictions, tuple):
            raise TypeError(
                f"`Run.out_of_bag` needs one output of the members, got a tuple of {len(predictions)}.\n"
                "Take the one that is meant, such as `fn=lambda model, x: model(x)[0]`."
            )
        if unseen is None:
            if self.num_rows not in (None, count := predictions.shape[1]):
                raise ValueError(
                    f"`Run.out_of_bag` needs all {self.num_rows} rows of the training data in their order, got {count}."
                    "\nOther rows are seen by no member: `run.predict(x, combine=combine.mean)`."
                )
            unseen = out_of_bag(self.rows, count)
        return held_out_mean(predictions, unseen, weights=own)

    def best(self, count: int = 1, *, by: Any = None, mode: Literal["min", "max"] | None = None) -> Ensemble[M]:
        """The best members, best first, without diverged ones.

        **Arguments:**

        - `count`: the number of members.
        - `by`: a score for each member `(members,)`; by default `best_score`.
        - `mode`: `"min"` if lower scores are better, `"max"` if higher. Required with `by`.

        **Returns:** the ensemble of these members. Stateful ones have a state, too: `run[run.ranking(count)]`.

        **Raises:** `TypeError` without scores; `ValueError` if fewer than `count` members have a score.
        """
        return self.ensemble[rank_members(self, count, by, mode)]

    def ranking(
        self, count: int | None = None, *, by: Any = None, mode: Literal["min", "max"] | None = None
    ) -> Int[np.ndarray, " n"]:
        """The positions of the best members `(count,)`, best first, without diverged ones.

        `run[run.ranking(3)]` is the run of the three best members, with their `hyper` and `state`.

        **Arguments**, **Raises:** as [`eqx_ensemble.Run.best`][]; without `count`, all that have a score are ranked.
        """
        return rank_members(self, count, by, mode)

    def plot(self, *, stride: int | None = None) -> Figure:
        """A figure of the run: training curves, validation scores, and the final scores against each hyperparameter.

        **Arguments:**

        - `stride`: the number of steps averaged for one point; by default for about 100 points.

        **Returns:** the matplotlib Figure: `run.plot().savefig("run.png")`.

        **Raises:** `ImportError` without matplotlib (extra `plot`); `ValueError` if no loss is finite.
        """
        from ..plot import figure_of_run

        return figure_of_run(self, stride=stride)

    def table(self) -> Any:
        """A table of one row per member: hyperparameters, scores, status.

        **Returns:** a `pandas.DataFrame` where pandas is installed (extra `pandas`), otherwise a dict of arrays
        `(members,)` that a terminal and a notebook show as a table. Both have `table["loss"]`, each member's mean over
        its last epoch. A hyperparameter of several numbers has one column for each, such as `table["betas[0]"]`.
        """
        state = self.train_state
        columns: dict[str, Any] = {"member": np.arange(len(self.status))}
        for path, values in jax.tree_util.tree_flatten_with_path(state.hyper)[0]:
            columns[jax.tree_util.keystr(path, simple=True, separator=".") or "hyper"] = to_host(values)
        columns["loss"] = to_host(state.loss)
        if state.best is not None:
            columns |= {"validation": self.best_score, "best_step": self.best_step}
        columns |= {"status": np.array([str(one) for one in Status])[self.status], "stopped_at": self.stopped_at}
        return table_of(columns)

    def __repr__(self) -> str:
        return summary(self)

    if not TYPE_CHECKING:  # which must not take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise attribute_error(self, name, _ELSEWHERE)


def best_of(state: TrainState) -> tuple[Ensemble, PyTree]:
    """The ensemble with the best weights of every member, the last ones without any score, and their model states."""
    if state.best is None:
        return state.ensemble, state.model_state
    weights, has_best = weights_of(state), state.best_step >= 0
    put = lambda x, y: jnp.where(has_best.reshape(-1, *[1] * (x.ndim - 1)), x, y) if eqx.is_array(x) else x
    own, model_state = jax.tree.map(put, state.best, (weights.own, state.model_state))
    common = weights.common if state.together is None else state.together.value[1]
    return with_weights(state, own, common).ensemble, model_state


def summary(run: Run[Any]) -> str:
    """The members, statuses, losses and best score."""
    if any(is_traced(x) for x in jax.tree.leaves(run)):
        return "Run(...)"
    status, steps = run.status, int(to_host(run.train_state.step).max())
    interrupted = ", interrupted" if run.interrupted else ""
    name = type(run.ensemble.stacked).__name__
    words = f"{steps} step" if steps == 1 else f"{steps} steps"
    title = f"Run of {members_in_words(len(status))} of `{name}`, {words}{interrupted}"
    lines = [title, f"  status   {status_text(status)}"]
    loss = to_host(run.train_state.loss)[status != Status.DIVERGED]
    if np.isfinite(loss).any():
        low, high = np.nanmin(loss), np.nanmax(loss)
        lines.append(f"  loss     {low:.4g}" + ("" if low == high else f" to {high:.4g}"))
    scores, steps = run.best_score, run.best_step
    if scores is not None and steps is not None and len(ranked := rank_members(run, None)):
        best = int(ranked[0])
        lines.append(f"  best     {scores[best]:.4g} by member {best} at step {steps[best]}")
    return "\n".join([*lines, f"  time     {run.seconds:.3g} s"])


def check_healthy(run: Run[Any], *, strict: bool = False) -> np.ndarray:
    """Warns of diverged members, or raises if all are, or any if `strict`. Returns which are not."""
    healthy = run.status != Status.DIVERGED
    if not healthy.all():
        message = f"Members {members_text(np.flatnonzero(~healthy))} diverged and are left out."
        if strict or not healthy.any():
            raise DivergedError(message, run)
        warn(message)
    return healthy


def healthy_weights(run: Run[Any], weights: Any) -> np.ndarray | None:
    """Weights `(members,)`, zero for diverged members; `None` if all are healthy and none are given."""
    healthy = check_healthy(run)
    if healthy.all():
        return weights
    return np.where(healthy, np.ones(len(healthy)) if weights is None else np.asarray(weights), 0)


def warn_of_diverged(run: Run[Any], before: np.ndarray, *, joint: bool = False) -> None:
    """Warns of the members that diverged in this call."""
    lost = (run.status == Status.DIVERGED) & ~before
    if lost.all():
        causes = "Do the data hold NaN, or labels out of range? Is the learning rate too high?"
        more = " One member's outputs that are not finite end a `JointLoss` of all: clip gradients." if joint else ""
        warn(f"`fit`: all members diverged. {causes}{more}")
    elif lost.any():
        at = ", ".join(map(str, run.stopped_at[lost][:8]))
        warn(
            f"`fit`: members {members_text(np.flatnonzero(lost))} diverged: at the end of an epoch their losses or "
            f"weights were not finite. They keep their weights of its start, step {at}."
        )


def warn_of_undefined(run: Run[Any]) -> None:
    """Warns of members whose validation score was never a number: `patience` stops them, and nothing is selected."""
    undefined = np.isinf(run.best_score) & np.isnan(to_host(run.train_state.score)) & (run.status != Status.DIVERGED)
    if undefined.any():
        names = members_text(np.flatnonzero(undefined))
        warn(f"`fit`: the validation scores of members {names} are NaN: they keep their last weights.")
