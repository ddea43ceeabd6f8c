from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Int8

from .. import tree
from .._check import array_leaves
from .._ensemble import Group
from .._ensemble._by_part import tree_by_part
from .._ensemble._check_group import check_distinct_parts
from .._predict import predict
from .._progress import members_in_words
from .._pytree import PyTree
from .._warnings import warn
from ._check_group import check_no_states, check_one_mode, check_runs
from ._check_run import check_run_weights, excluded_message
from ._errors import DivergedError
from ._group_history import group_columns, group_history
from ._rank import rank_members
from ._run import Run
from ._status import Status
from ._summary import data_frame, summary
from .compiled._selection import Mode
from .host._record import History


class GroupRun(eqx.Module):
    """The result of [`eqx_ensemble.fit`][] for an [`eqx_ensemble.Group`][]: one run per part.

    Runs of ensembles that were trained separately can be joined as well.

    **Arguments:**

    - `runs`: a dict from the names of the parts to their runs, whose members have different ids.
    - `order`: the order of the members, as for [`eqx_ensemble.Group`][].

    **Attributes:**

    - `runs`: the [`eqx_ensemble.Run`][] of each part by name, in alphabetical order.
    - `order`: as for [`eqx_ensemble.Group`][].

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    wide = ee.build(lambda key: eqx.nn.MLP(3, 1, 32, 1, key=key), 2, key=key)
    linear = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key)
    group = ee.Group({"wide": wide, "linear": linear}, renumber=True)
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    run = ee.fit(group, loss, optax.adam(1e-3), (x, y), epochs=1, key=key)
    run.predict(x).shape  # (4, 100, 1)
    run.runs["wide"].history.loss.shape  # (2, 4)
    ```
    """

    runs: dict[str, Run[Any]]
    order: tuple[int, ...]

    def __init__(self, runs: Mapping[str, Run[Any]], *, order: Sequence[int] | None = None) -> None:
        given = check_runs(runs, name="GroupRun")
        parts = {part: run.ensemble for part, run in given.items()}
        check_distinct_parts(parts, name="GroupRun", fix="Build each ensemble with its own before training: ")
        self.order = Group(parts, order=order).order
        self.runs = {part: given[part] for part in sorted(given)}

    def __repr__(self) -> str:
        lines = [f"GroupRun of {members_in_words(len(self.order))} in {len(self.runs)} parts"]
        for part, run in self.runs.items():
            lines += [f"  {part}", *(f"    {line}" for line in summary(run).splitlines())]
        return "\n".join(lines)

    @property
    def group(self) -> Group:
        """The trained group; with validation data, every member has its best weights, else its last."""
        return Group({part: run.ensemble for part, run in self.runs.items()}, order=self.order)

    @property
    def healthy(self) -> Group:
        """The trained group without the members that diverged."""
        kept = self.status != Status.DIVERGED
        return self.group if kept.all() else self.group[kept]

    @property
    def status(self) -> Int8[np.ndarray, " members"]:
        """The status of each member `(members,)`, in the order of the group."""
        return np.concatenate([run.status for run in self.runs.values()])[np.asarray(self.order)]

    @property
    def history(self) -> History:
        """The curves of all members, in the order of the group, with NaN where the run of a part was shorter.

        `validation_step` holds the steps of all validations, with NaN scores for parts that were not validated at one.
        `aux` is a dict from the names of parts to their auxiliary outputs.
        """
        return group_history(self.runs, self.order)

    def predict(
        self,
        x: PyTree,
        *,
        combine: Callable[..., Any] | None = None,
        weights: Any = None,
        strict: bool = False,
        **options: Any,
    ) -> Any:
        """Predicts with the members that did not diverge; a warning names those that did.

        **Arguments:** as for [`eqx_ensemble.Run.predict`][]; `fn`, `plan` and `x` may be dicts with one value for each
        part, as for [`eqx_ensemble.predict`][].

        **Returns:** the predictions, each array `(healthy members, rows, ...)`; with `combine`, its result.

        **Raises:** [`eqx_ensemble.train.DivergedError`][] if all members diverged, or with `strict` if any did; and as
        [`eqx_ensemble.Run.predict`][].
        """
        name, healthy = "GroupRun.predict", self.status != Status.DIVERGED
        weights = check_run_weights(weights, healthy, combine, name=name)
        if not healthy.all():
            message = excluded_message(np.asarray(self.group.ids)[~healthy], healthy, name=name)
            if strict or not healthy.any():
                raise DivergedError(message, self)
            warn(message)
        group = self.healthy
        state = {part: _state_of(self.runs[part]) for part in group.parts if self.runs[part].state is not None}
        kept = lambda value: {part: value[part] for part in group.parts}
        by_part = {word: tree_by_part(options.get(word), self.runs) for word in ("fn", "plan")}
        options |= {word: kept(values) for word, values in by_part.items() if values is not None}
        own = tree_by_part(x, self.runs)
        x = x if own is None else kept(own)
        return predict(group, x, combine=combine, weights=weights, state=state or None, **options)

    def best(self, count: int = 1, *, by: Any = None, mode: Mode | None = None) -> Group:
        """The best members of all parts, best first, without diverged ones.

        **Arguments:** as for [`eqx_ensemble.Run.best`][]. The validation scores of all parts must be comparable.

        **Returns:** a smaller group.

        **Raises:** as [`eqx_ensemble.Run.best`][]; `ValueError` if the validation scores of the parts have different
        modes.
        """
        check_no_states(self.runs, name="GroupRun.best")
        return self.group[rank_members(_Ranks(self, by), count, by, mode, name="GroupRun.best")]

    def table(self, *, as_frame: bool = False) -> Any:
        """A table of one row per member: id, part, hyper-parameters, scores, status.

        **Arguments:**

        - `as_frame`: return a `pandas.DataFrame` (extra `pandas`).

        **Returns:** a dict from column names to arrays `(members, ...)`, with NaN where a part has no such column; or a
        data frame.

        **Raises:** `ImportError` if pandas is not installed.
        """
        columns = group_columns(self.runs, self.order)
        return data_frame(columns) if as_frame else columns


class _Ranks:
    """The scores, the status and the mode by which members of all parts are ranked."""

    def __init__(self, run: GroupRun, by: Any) -> None:
        scores = [part.best_score for part in run.runs.values()]
        joined = (
            None if any(own is None for own in scores) else np.concatenate([own for own in scores if own is not None])
        )
        self.best_score = None if joined is None else joined[np.asarray(run.order)]
        self.status = run.status
        self.mode = check_one_mode(run.runs, by=by, name="GroupRun.best")


def _state_of(run: Run[Any]) -> Any:
    healthy = run.status != Status.DIVERGED
    return run.state if healthy.all() or not array_leaves(run.state) else tree.take(run.state, healthy)
