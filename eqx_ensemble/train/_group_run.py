import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Int8

from .. import _axes, tree
from .._caller import caller
from .._check import array_leaves, kind_text
from .._ensemble import (
    Group,
    by_part,
    check_distinct_parts,
    check_part_names,
    data_by_part,
    explain_part,
    member_positions,
    members_by_part,
    states_by_part,
    take,
    tree_by_part,
)
from .._foreign import as_numpy, from_foreign_tree
from .._predict import predict
from .._progress import members_in_words
from .._pytree import PyTree
from .._warnings import warn
from ._check_run import check_run_weights, excluded_message
from ._hyper import hyper_arrays
from ._options import Stopping, Validation, limits_of
from ._ranking import rank_members
from ._run import Run, data_frame, summary, table_columns
from ._status import DivergedError, Status
from .compiled._selection import Mode
from .data._source import is_batches
from .host._record import History

# The curves and the tables of several runs, joined over all members.


def group_history(runs: Mapping[str, Run[Any]], order: Sequence[int]) -> History:
    """The curves of all members, with NaN where the run of a part has no value."""
    histories, members = {part: run.history for part, run in runs.items()}, np.asarray(order)
    step = np.unique(np.concatenate([history.step for history in histories.values()]))
    loss = np.concatenate([_at_steps(history.loss, history.step, step) for history in histories.values()])
    aux = {part: history.aux for part, history in histories.items() if history.aux is not None}
    at = np.unique(np.concatenate([history.validation_step for history in histories.values()]))
    scores = None
    if any(history.validation is not None for history in histories.values()):
        scores = np.concatenate([_at_steps(_scores_of(own), own.validation_step, at) for own in histories.values()])
        scores = scores[members]
    return History(loss[members], aux or None, scores, at, step)


def group_columns(runs: Mapping[str, Run[Any]], order: Sequence[int]) -> dict[str, np.ndarray]:
    """The tables of all runs as one, with a column `part`."""
    tables = {part: table_columns(run) for part, run in runs.items()}
    for part, table in tables.items():
        table["part"] = np.full(len(table["member"]), part)
    names = list(dict.fromkeys(["member", "part", *(name for table in tables.values() for name in table)]))
    last = [name for name in ("loss", "validation", "best_step", "status", "stopped_at") if name in names]
    names = [name for name in names if name not in last] + last
    return {name: _column(name, list(tables.values()))[np.asarray(order)] for name in names}


def _column(column: str, tables: list[dict[str, np.ndarray]]) -> np.ndarray:
    shape = next(table[column].shape[1:] for table in tables if column in table)
    nothing = lambda table: np.full((len(table["member"]), *shape), np.nan)
    return np.concatenate([table[column] if column in table else nothing(table) for table in tables])


def _scores_of(history: History) -> np.ndarray:
    """Validation scores `(members, validations)`; NaN for a part without any."""
    if history.validation is not None:
        return history.validation
    return np.full((len(history.loss), len(history.validation_step)), np.nan, history.loss.dtype)


def _at_steps(curves: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Curves `(members, step)` in the columns `steps`; if a step occurs twice, its last value that is not NaN."""
    found = np.full((len(curves), len(steps)), np.nan, curves.dtype)
    columns = np.searchsorted(steps, step)
    if len(np.unique(columns)) == len(columns):
        found[:, columns] = curves
        return found
    for column, own in zip(columns, curves.T, strict=True):
        found[:, column] = np.where(np.isnan(own), found[:, column], own)
    return found


def check_runs(runs: Any) -> dict[str, Run[Any]]:
    """Raises unless `runs` are runs of `fit` by the names of their parts. Returns them as a dict."""
    if not isinstance(runs, Mapping) or not runs:
        raise TypeError(f"`{caller()}` needs a dict from the names of parts to their runs, got {kind_text(runs)}.")
    check_part_names(runs)
    for part, run in runs.items():
        if not isinstance(run, Run):
            raise TypeError(f"`{caller()}` needs runs of `fit`, got {kind_text(run)} for the part {part!r}.")
    return dict(runs)


def check_one_mode(runs: Mapping[str, Run[Any]], *, by: Any) -> Mode:
    """Raises if members are ranked by scores of different modes. Returns the mode."""
    modes: dict[Mode, str] = {run.mode: part for part, run in runs.items() if run.selection is not None}
    if by is None and len(modes) > 1:
        listed = " and ".join(f"{mode!r} of `{part}`" for mode, part in modes.items())
        raise ValueError(
            f"`{caller()}` needs validation scores of one `mode`, got {listed}.\n"
            "Pass one score for each member: `by=scores, mode=...`."
        )
    return next(iter(modes)) if modes else "min"


def check_no_states(runs: Mapping[str, Run[Any]]) -> None:
    """Raises if members have states that are not selected with them."""
    stateful = [part for part, run in runs.items() if run.state is not None]
    if stateful:
        raise TypeError(
            f"`{caller()}` returns members without their states, and those of {stateful[0]!r} have some.\n"
            f"Get both from a part: `part = run.runs[{stateful[0]!r}]`, then `part[part.ranking(...)]`."
        )


def check_data_of_parts(data: Any, parts: Iterable[str]) -> None:
    """Raises if an iterable of batches that all parts use can be iterated only once."""
    if iter(data) is data:
        listed = ", ".join(f"{part!r}: ..." for part in parts)
        raise TypeError(
            f"`{caller()}` trains the parts of a group one after another, and {kind_text(data)} can be iterated only "
            "once.\nPass what can be iterated again, such as a loader or a list, or an iterator for each part: "
            f"`{{{listed}}}`."
        )


def interrupted_message(untrained: list[str]) -> str:
    """The warning that some parts of a group were not trained."""
    return (
        f"`fit` was interrupted; these parts of the group have not been trained, and are not in the run: "
        f"{', '.join(f'`{part}`' for part in untrained)}."
    )


class GroupRun(eqx.Module):
    """The result of [`eqx_ensemble.fit`][] for an [`eqx_ensemble.Group`][]: one run per part.

    It also joins runs that were trained separately.

    **Arguments** and **attributes:**

    - `runs`: a dict from the names of the parts to their [`eqx_ensemble.Run`][], whose members have different ids.
    - `order`: the order of the members, as for [`eqx_ensemble.Group`][].

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
        given = check_runs(runs)
        parts = {part: run.ensemble for part, run in given.items()}
        check_distinct_parts(parts, fix="Build each ensemble with its own before training: ")
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
        """Predicts with the members that did not diverge, as [`eqx_ensemble.Run.predict`][] does.

        `fn`, `plan` and `x` may be dicts with one value for each part.
        """
        healthy = self.status != Status.DIVERGED
        weights = check_run_weights(weights, healthy, combine)
        if not healthy.all():
            message = excluded_message(np.asarray(self.group.ids)[~healthy], healthy)
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
        """The best members of all parts as a smaller group, best first, as by [`eqx_ensemble.Run.best`][].

        The validation scores of all parts must be comparable: `ValueError` if their modes differ.
        """
        check_no_states(self.runs)
        return self.group[rank_members(_Ranks(self, by), count, by, mode)]

    def table(self, *, as_frame: bool = False) -> Any:
        """A table as of [`eqx_ensemble.Run.table`][] with a column `part`, and NaN where a part has no such column."""
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
        self.mode = check_one_mode(run.runs, by=by)


def _state_of(run: Run[Any]) -> Any:
    healthy = run.status != Status.DIVERGED
    return run.state if healthy.all() or not array_leaves(run.state) else tree.take(run.state, healthy)


_BY_PART = set("loss optimiser epochs steps batch_size patience stop on_diverge plan checkpoint callbacks".split())


def fit_parts(fit: Callable[..., Run[Any]], begun: Group | GroupRun, options: dict[str, Any]) -> GroupRun:
    """Trains the parts of a group one after another, each by `fit`.

    **Arguments:**

    - `options`: all other arguments of `fit`, by name.
    """
    group = begun if isinstance(begun, Group) else begun.group
    starts = group.parts if isinstance(begun, Group) else begun.runs
    own = {name: _of_parts(group, name, value) for name, value in options.items()}
    done: dict[str, Run[Any]] = {}
    for part, start in starts.items():
        try:
            with explain_part(part):
                done[part] = fit(start, **{name: values[part] for name, values in own.items()})
        except Exception as error:
            run = getattr(error, "run", None)
            if isinstance(run, Run):
                error.run = _run_of(group, done | {part: run})  # pyright: ignore[reportAttributeAccessIssue]
            raise
        if done[part].interrupted:
            break
    untrained = [part for part in starts if part not in done]
    if untrained:
        warn(interrupted_message(untrained))
    return _run_of(group, done)


def _run_of(group: Group, runs: dict[str, Run[Any]]) -> GroupRun:
    """The runs of some parts, in the order of the group."""
    positions = member_positions(group)
    return GroupRun(runs, order=np.argsort(np.concatenate([positions[part] for part in sorted(runs)])).tolist())


def _of_parts(group: Group, argument: str, value: Any) -> dict[str, Any]:
    """An argument of `fit` for each part."""
    if isinstance(value, Validation):
        own = _data_of_parts(group, argument, value.data)
        return {part: dataclasses.replace(value, data=data) for part, data in own.items()}
    if argument in ("data", "validation"):
        return _data_of_parts(group, argument, value)
    if isinstance(value, Stopping):
        limits_of(value, group.num_members)
        return {part: take(value, positions) for part, positions in member_positions(group).items()}
    if argument == "hyper":
        own = tree_by_part(value, group.parts)
        if own is None and value is not None:
            value = hyper_arrays(value, group.num_members)
        return members_by_part(group, value, argument) if own is None else own
    if argument == "rows":
        if value is not None and tree_by_part(value, group.parts) is None:
            value = as_numpy(_axes.map_each(lambda rows: rows, value), argument)
        return members_by_part(group, value, argument)
    if argument == "state":
        return states_by_part(value, group.parts)
    if argument == "trainable":
        return tree_by_part(value, group.parts) or dict.fromkeys(group.parts, value)
    if argument == "checkpoint" and isinstance(value, str | os.PathLike):
        return {part: os.path.join(value, part) for part in group.parts}
    return by_part(value, group.parts, argument) if argument in _BY_PART else dict.fromkeys(group.parts, value)


def _data_of_parts(group: Group, argument: str, value: Any) -> dict[str, Any]:
    own = tree_by_part(value, group.parts)
    if own is not None or value is None:
        return dict.fromkeys(group.parts) if own is None else own
    if is_batches(value):
        check_data_of_parts(value, group.parts)
        return dict.fromkeys(group.parts, value)
    return data_by_part(group, from_foreign_tree(value, argument))
