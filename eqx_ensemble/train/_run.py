import warnings
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import _check, tree
from .._ensemble import Ensemble, M
from ..plan import AbstractPlan
from ..predict import predict
from ._revive import Revival
from ._select import Selection
from ._state import DIVERGED, STATUS_NAMES, TrainState


class History(eqx.Module):
    """The curves of a run, on the host.

    **Attributes:**

    - `loss`: `(members, steps)`, the training loss before each step's update; NaN after a member has left. A run that
        went on from a training state has the steps of its own only.
    - `aux`: the loss's auxiliary outputs, each `(members, steps, ...)`, NaN (zero for integers) after a member has
        left; `None` without `has_aux`.
    - `validation`: `(members, validations)`, NaN after a member has left; `None` without validation data.
    - `validation_step`: `(validations,)`, the number of steps done at each validation.
    """

    loss: Float[np.ndarray, "members steps"]
    aux: PyTree
    validation: Float[np.ndarray, "members validations"] | None
    validation_step: Int[np.ndarray, " validations"]


class Run(eqx.Module, Generic[M]):
    """What [`eqx_ensemble.fit`][] returns.

    **Attributes:**

    - `ensemble`: the trained ensemble: with validation data, every member at its own best weights; else the last.
    - `state`: the stacked `equinox.nn.State` that goes with it; `None` for stateless members.
    - `history`: the curves of the run.
    - `status`: `(members,)` of `"ok"`, `"stopped"` (its patience ended) or `"diverged"` (its loss or weights were
        not finite: it keeps the last that were). `run.healthy` leaves these out.
    - `left`: `(members,)`, the step at which a member left; -1 for members that trained to the end.
    - `fault`: `(members,)`, what was first not finite in a member that diverged: `"loss"` or the path of a weight;
        empty for the others.
    - `revived`: the members that diverged and came back, in order; see [`eqx_ensemble.train.Revive`][].
    - `best_step`, `best_score`: `(members,)`, when each member's validation score was best, and that score (-1 and
        infinity where there was none); `None` without validation data.
    - `train_state`: the last training state, to go on from with [`eqx_ensemble.fit`][] or
        [`eqx_ensemble.train.make_step`][].
    - `selection`: each member's best weights and how long it has waited for better ones; `None` without validation
        data.
    - `plan`: how the members were executed; after `plan="auto"`, `run.plan.explain()` says why.
    - `interrupted`: whether Ctrl-C ended the run early.
    """

    ensemble: Ensemble[M]
    state: PyTree
    history: History
    status: np.ndarray
    left: Int[np.ndarray, " members"]
    fault: np.ndarray
    revived: list[Revival]
    best_step: Int[np.ndarray, " members"] | None
    best_score: Float[np.ndarray, " members"] | None
    train_state: TrainState[M]
    selection: Selection | None
    plan: AbstractPlan
    interrupted: bool

    @property
    def healthy(self) -> Ensemble[M]:
        """The trained ensemble without the members that diverged."""
        kept = self.status != STATUS_NAMES[DIVERGED]
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
        - `combine`: what makes one prediction of all, such as [`eqx_ensemble.combine.mixture`][]; it is called as
            `combine(predictions, weights=weights)`.
        - `weights`: for `combine`, one weight for each member of the run `(members,)`; those of members left out count
            for nothing, and the rest is divided by its sum.
        - `strict`: raise [`eqx_ensemble.train.DivergedError`][] instead of leaving members out.

        **Returns:** the predictions, each array `(healthy members, rows, ...)`; what `combine` makes of them, if given.
        """
        healthy = self.status != STATUS_NAMES[DIVERGED]
        weights = _check.weights_left(weights, healthy, combine, name="Run.predict")
        if not healthy.all():
            message = _check.left_out(np.asarray(self.ensemble.ids)[~healthy], healthy, name="Run.predict")
            if strict or not healthy.any():
                raise DivergedError(message, self)
            warnings.warn(message, stacklevel=2)
        state = self.state if self.state is None or healthy.all() else tree.take(self.state, healthy)
        prediction = predict(self.healthy, x, state=state, **options)
        return prediction if combine is None else combine(prediction, weights=weights)

    def best(self, count: int = 1, *, by: Any = None) -> Ensemble[M]:
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
        - `by`: a score for each member `(members,)`, lower is better; `best_score` if not given.

        **Returns:** the ensemble of these members.

        **Raises:** TypeError without validation scores and `by`, because training losses do not tell which member is
        better; ValueError when fewer members are left.
        """
        scores = _check.scores_to_rank(self.best_score if by is None else by, len(self.status), name="Run.best")
        scores = np.where(self.status == STATUS_NAMES[DIVERGED], np.inf, scores)
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
        for path, values in jax.tree_util.tree_flatten_with_path(self.train_state.fixed.hyper)[0]:
            columns[jax.tree_util.keystr(path, simple=True, separator=".") or "hyper"] = np.asarray(values)
        columns["loss"] = _last_finite(self.history.loss)
        if self.best_score is not None and self.best_step is not None:
            columns["validation"] = self.best_score
            columns["best_step"] = self.best_step
        columns |= {"status": self.status, "left": self.left}
        return _frame(columns) if as_frame else columns


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far."""

    def __init__(self, message: str, run: Run):
        super().__init__(message)
        self.run = run


def _frame(columns: dict[str, np.ndarray]) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(_check.missing_extra("Run.table(as_frame=True)", "pandas", "pandas")) from error
    flat = {}
    for name, values in columns.items():
        for place in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in place)] = values[:, *place]
    return pandas.DataFrame(flat)


def status_names(status: Array | np.ndarray) -> np.ndarray:
    """The status of every member in words."""
    return np.array(STATUS_NAMES)[np.asarray(status)]


def _last_finite(curves: np.ndarray) -> np.ndarray:
    finite = np.isfinite(curves)
    last = curves.shape[1] - 1 - np.argmax(finite[:, ::-1], axis=1)
    return np.where(finite.any(axis=1), np.take_along_axis(curves, last[:, None], axis=1)[:, 0], np.nan)


class Record:
    """Collects a run's outputs on the host, piece by piece."""

    def __init__(self, *, first_step: int = 0, history: History | None = None):
        self._outputs: list[Any] = []
        self._scores: list[np.ndarray] = []
        self._score_steps: list[int] = []
        self._latest: np.ndarray | None = None
        self._first_step = self.steps = first_step
        if history is not None:
            self.add_steps(jax.tree.map(lambda curves: np.moveaxis(curves, 1, 0), (history.loss, history.aux)))
            if history.validation is not None:
                self._scores = list(history.validation.T)
                self._score_steps = history.validation_step.tolist()

    def add_steps(self, outputs: PyTree) -> None:
        """Outputs of consecutive steps, each `(steps, members, ...)`."""
        outputs = jax.tree.map(np.asarray, outputs)
        if self._outputs:
            _check.same_outputs(*(jax.tree.map(lambda x: x[0], part) for part in (self._outputs[0], outputs)))
        self._outputs.append(outputs)
        self.steps += outputs[0].shape[0]
        last = _last_finite(outputs[0].T)
        self._latest = last if self._latest is None else np.where(np.isfinite(last), last, self._latest)

    def add_scores(self, scores: Any) -> None:
        """The members' validation scores `(members,)` after the steps so far."""
        self._scores.append(np.asarray(scores))
        self._score_steps.append(self.steps)

    @property
    def latest(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Each member's latest loss `(members,)` and best validation score `(members,)`, also when it has left."""
        assert self._latest is not None
        return self._latest, np.fmin.reduce(self._scores) if self._scores else None

    @property
    def validated(self) -> bool:
        """Whether the present weights have their score."""
        return self._score_steps[-1:] == [self.steps]

    def history(self) -> History:
        """The curves, `members` first."""
        loss, aux = jax.tree.map(lambda *parts: np.moveaxis(np.concatenate(parts), 0, 1), *self._outputs)
        # The chunk in which the last member left may have gone on without anyone.
        trained = max(int(np.flatnonzero(np.isfinite(loss).any(axis=0)).max(initial=-1)) + 1, 1)
        loss, aux = jax.tree.map(lambda curves: curves[:, :trained], (loss, aux))
        steps = np.array(self._score_steps, np.int64)
        kept = steps <= self._first_step + trained
        validation = np.stack(self._scores, axis=1)[:, kept] if self._scores else None
        return History(loss, aux, validation, steps[kept])
