import html
import warnings
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int8, PyTree

from .. import _axes, _check, tree
from .._ensemble import Ensemble, M
from .._predict import predict
from ..distributed import to_host
from ..plan import AbstractPlan
from ..resample import Folds, HeldOut, out_of_bag_mean, out_of_fold
from ..resample._check_held_out import check_folds
from ._check_held_out import check_drawn_rows, check_fold_count, check_no_copies, check_rows_of_folds
from ._errors import DivergedError
from ._revive import Revival
from ._state import TrainState
from ._status import Status, status_names
from ._summary import summary
from .compiled._selection import Mode, Selection
from .host._record import History, last_finite


class Run(eqx.Module, Generic[M]):
    """What [`eqx_ensemble.fit`][] returns.

    **Attributes:**

    - `ensemble`: the trained ensemble: with validation data, every member at its own best weights; else the last.
    - `state`: the stacked `equinox.nn.State` that goes with it; `None` for stateless members.
    - `history`: the curves of the run.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    - `stopped_at`: `(members,)`, the step at which a member stopped or diverged; -1 for members that trained to the
        end.
    - `fault`: `(members,)`, what was first not finite in a diverged member: `"loss"` or the path of a weight; empty
        for the others.
    - `revived`: the members that diverged and came back, in order; see [`eqx_ensemble.train.Revive`][].
    - `best_step`, `best_score`: `(members,)`, when each member's validation score was best, and that score (-1 and
        infinity where there was none, minus infinity with `mode="max"`); `None` without validation data.
    - `train_state`: the last training state, to go on from with [`eqx_ensemble.fit`][] or
        [`eqx_ensemble.train.make_step`][].
    - `selection`: each member's best weights and how long it has waited for better ones; `None` without validation
        data.
    - `rows`: what was given to `fit` as `rows`, `(members, n)`, in all runs that this one went on from; `None` where a
        run was given none.
    - `data_state`: where an iterator of batches stood after the last step, if it says that (`get_state` or
        `state_dict`); another run goes on from there. `None` at the end of an epoch, and for arrays.
    - `plan`: how the members were executed; after `plan="auto"`, `run.plan.explain()` says why.
    - `interrupted`: whether Ctrl-C ended the run early.
    - `seconds`: how long it took, with its compilations; of a run that was resumed, in all its processes.

    Shown as text, and in a notebook, a run is a summary of a few lines.
    """

    ensemble: Ensemble[M]
    state: PyTree
    history: History
    status: Int8[np.ndarray, " members"]
    stopped_at: Int[np.ndarray, " members"]
    fault: np.ndarray
    revived: list[Revival]
    best_step: Int[np.ndarray, " members"] | None
    best_score: Float[np.ndarray, " members"] | None
    train_state: TrainState[M]
    selection: Selection | None
    rows: Int[np.ndarray, "members n"] | None
    data_state: Any
    plan: AbstractPlan
    interrupted: bool
    seconds: float

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(summary(self))}</pre>"

    @property
    def healthy(self) -> Ensemble[M]:
        """The trained ensemble without the members that diverged."""
        kept = self.status != Status.DIVERGED
        return self.ensemble if kept.all() else self.ensemble[kept]

    def predict(
        self,
        x: PyTree,
        *,
        combine: Callable[..., Any] | None = None,
        weights: Any = None,
        strict: bool = False,
        **options: Any,
    ) -> PyTree:
        """Predictions of the members that did not diverge; a warning names those that did.

        ```python
        def loss(model, batch, key):
            x, y = batch
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
        x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
        run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=1, key=key)
        run.predict(x).shape  # (4, 100, 1)
        run.predict(x, combine=ee.combine.mean, weights=[0.1, 0.2, 0.3, 0.4]).shape  # (100, 1)
        ```

        **Arguments:**

        - `x`, `options`: as for [`eqx_ensemble.predict`][]; the members' state is the run's own.
        - `combine`: what makes one prediction of all, such as [`eqx_ensemble.combine.mixture`][], batch by batch of
            rows, as for [`eqx_ensemble.predict`][].
        - `weights`: for `combine`, one weight for each member of the run `(members,)`; those of members left out count
            for nothing, and the rest is divided by its sum.
        - `strict`: raise [`eqx_ensemble.train.DivergedError`][] instead of leaving members out.

        **Returns:** the predictions, each array `(healthy members, rows, ...)`; what `combine` makes of them, if given.
        """
        healthy = self.status != Status.DIVERGED
        weights = _check.weights_left(weights, healthy, combine, name="Run.predict")
        if not healthy.all():
            message = _check.left_out(np.asarray(self.ensemble.ids)[~healthy], healthy, name="Run.predict")
            if strict or not healthy.any():
                raise DivergedError(message, self)
            warnings.warn(message, stacklevel=2)
        state = self.state if self.state is None or healthy.all() else tree.take(self.state, healthy)
        return predict(self.healthy, x, combine=combine, weights=weights, state=state, **options)

    def out_of_bag(self, x: PyTree, drawn: Any = None, *, weights: Any = None, **options: Any) -> HeldOut:
        """A prediction for every row of the training data, by the members that never saw it.

        ```python
        def loss(model, batch, key):
            x, y = batch
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, key=key)
        x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
        rows = ee.resample.bootstrap(len(x), 8, key=key)
        run = ee.fit(ensemble, loss, optax.adam(1e-3), (x, y), epochs=1, rows=rows, key=key)
        run.out_of_bag(x).mean.shape  # (100, 1)
        ```

        **Arguments:**

        - `x`: what [`eqx_ensemble.predict`][] takes, of all rows of the training data in their order.
        - `drawn`: what the members were trained on, as for [`eqx_ensemble.resample.out_of_bag`][]; the rows that `fit`
            was given, if not given.
        - `weights`: convex weights over members `(members,)`.
        - `options`: as for [`eqx_ensemble.predict`][]. Class probabilities are averaged, not logits:
            `fn=lambda model, x: jax.nn.softmax(model(x))`.

        **Returns:** [`eqx_ensemble.resample.HeldOut`][]. Members that diverged count for nothing; a warning names them.
        """
        drawn = check_drawn_rows(drawn, self.rows)
        check_no_copies(self.revived, name="Run.out_of_bag")
        weights = self._weights_of_the_healthy(weights, name="Run.out_of_bag")
        return out_of_bag_mean(predict(self.ensemble, x, state=self.state, **options), drawn, weights=weights)

    def out_of_fold(self, x: PyTree, folds: Folds, *, weights: Any = None, **options: Any) -> HeldOut:
        """A prediction for every row of the data, by the member that was tested on it.

        Each member predicts its own fold only, which costs as much as one model on all rows.

        **Arguments:**

        - `x`: what [`eqx_ensemble.predict`][] takes, of all rows of the data in their order.
        - `folds`: what the members were trained on: `fit(..., rows=folds.train)`.
        - `weights`, `options`: as for [`eqx_ensemble.Run.out_of_bag`][].

        **Returns:** [`eqx_ensemble.resample.HeldOut`][]; see [`eqx_ensemble.methods.cross_fit`][] for an example.
        """
        check_folds("Run.out_of_fold", folds)
        check_fold_count(folds.test.shape[0], len(self.status), name="Run.out_of_fold")
        check_no_copies(self.revived, name="Run.out_of_fold")
        num_rows = _check.check_rows_of_data(
            x, _axes.Each, len(self.status), argument="x", name="Run.out_of_fold", finite=False
        )
        check_rows_of_folds(num_rows, folds, self.rows, name="Run.out_of_fold")
        weights = self._weights_of_the_healthy(weights, name="Run.out_of_fold")
        of_each = lambda x: jax.vmap(lambda x, rows: x[rows])(jnp.asarray(x), folds.test)
        own = lambda value: _axes.Each(jax.tree.map(of_each, value))
        own_rows = _axes.map_each(own, x, shared=lambda x: _axes.Each(jnp.asarray(x)[folds.test]))
        tested = predict(self.ensemble, own_rows, state=self.state, **options)
        return out_of_fold(tested, folds, rows="test", weights=weights)

    def _weights_of_the_healthy(self, weights: Any, *, name: str) -> np.ndarray | None:
        """Weights `(members,)` in which members that diverged have none, or `None` where all are equal."""
        healthy = self.status != Status.DIVERGED
        if healthy.all():
            return weights
        message = _check.left_out(np.asarray(self.ensemble.ids)[~healthy], healthy, name=name)
        if not healthy.any():
            raise DivergedError(message, self)
        warnings.warn(message, stacklevel=3)
        kept = np.zeros(len(healthy))
        given = np.ones(len(healthy)) if weights is None else weights
        kept[healthy] = _check.weights_left(given, healthy, out_of_bag_mean, name=name)
        return kept

    @property
    def mode(self) -> Mode:
        """Whether a lower (`"min"`) or a higher (`"max"`) validation score is better, as `fit` was told."""
        return "min" if self.selection is None else self.selection.mode

    def best(self, count: int = 1, *, by: Any = None, mode: Mode | None = None) -> Ensemble[M]:
        """The best members, the best one first; those that diverged are never among them.

        ```python
        def loss(model, batch, key):
            x, y = batch
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
        data = jnp.ones((100, 3)), jnp.zeros((100, 1))
        run = ee.fit(ensemble, loss, optax.adam(1e-3), data, epochs=1, validation=data, key=key)
        run.best(3).ids  # (3,)
        ```

        **Arguments:**

        - `count`: how many.
        - `by`: a score for each member `(members,)`; `best_score` if not given.
        - `mode`: whether lower scores are better, `"min"`, or higher ones, `"max"`. If not given, lower ones of `by`,
            and what `fit` was told of `best_score`.

        **Returns:** the ensemble of these members.

        **Raises:** TypeError without validation scores and `by`, because training losses do not tell which member is
        better; ValueError when fewer members are left.
        """
        mode = mode or (self.mode if by is None else "min")
        _check.check_mode(mode, name="Run.best")
        scores = _check.scores_to_rank(self.best_score if by is None else by, len(self.status), name="Run.best")
        scores = scores if mode == "min" else -scores
        scores = np.where(self.status == Status.DIVERGED, np.inf, scores)
        order = np.argsort(np.where(np.isnan(scores), np.inf, scores), kind="stable")
        _check.enough_to_rank(count, int(np.isfinite(scores).sum()), name="Run.best")
        return self.ensemble[order[:count]]

    def table(self, *, as_frame: bool = False) -> Any:
        """One row a member, as plain columns `(members, ...)`: id, hyper-parameters, scores, status.

        **Arguments:**

        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`), a hyper-parameter of several numbers as several
            columns.

        **Returns:** a dict from column to values; a data frame if asked.
        """
        columns = {"member": np.asarray(self.ensemble.ids)}
        for path, values in jax.tree_util.tree_flatten_with_path(self.train_state.hyper)[0]:
            columns[_check.hyper_column(path)] = to_host(values)
        columns["loss"] = last_finite(self.history.loss)
        if self.best_score is not None and self.best_step is not None:
            columns["validation"] = self.best_score
            columns["best_step"] = self.best_step
        columns |= {"status": status_names(self.status), "stopped_at": self.stopped_at}
        return _frame(columns) if as_frame else columns


def _frame(columns: dict[str, np.ndarray]) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(_check.missing_extra_message("Run.table(as_frame=True)", "pandas", "pandas")) from error
    flat = {}
    for name, values in columns.items():
        for place in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in place)] = values[:, *place]
    return pandas.DataFrame(flat)
