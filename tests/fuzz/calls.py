"""Random calls of `fit`: the drawn options, and what the reference makes of them."""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

from ..factories import grouped
from . import problem

TRAINABLE = {"all": eqx.is_inexact_array, "vectors": lambda x: eqx.is_inexact_array(x) and x.ndim == 1}


@dataclasses.dataclass(frozen=True)
class Call:
    """The drawn options; how `lengths` are run: `whole`, or cut and continued in one of the ways of `test_fit`."""

    seed: int
    source: str
    num_members: int
    ids: list[int]
    stateful: bool
    has_aux: bool
    hyper_used: bool
    optimiser_name: str
    trained: str
    each: bool
    own_rows: int | None
    shuffle: bool | str
    given_batch_size: int | None
    validated_on: str | None
    mode: str | None
    patience: int | None
    min_delta: float
    smooth: float
    target: float | list[float] | None
    max_steps: int | list[int] | None
    max_seconds: list[float] | None
    history: Any
    on_diverge: str
    faults: list[int]
    scale: float
    perturbs: bool
    most: int
    plan: str
    scan: bool | None
    mesh: tuple[int, int] | None
    callback_every: int | None
    stops: dict[int, list[int]]
    ends_at: int | None
    how: str
    lengths: list[int]
    in_epochs: bool
    checkpoint_every: int | None

    @ft.cached_property
    def hyper(self):
        if not self.hyper_used:
            return None
        rates = np.linspace(0.02, 0.1, self.num_members, dtype=np.float32)
        scale = np.full(self.num_members, self.scale, np.float32)
        return {"lr": rates, "fault": np.array(self.faults, np.int32), "scale": scale}

    @property
    def loss(self):
        return problem.loss_of(stateful=self.stateful, has_aux=self.has_aux, hyper=self.hyper_used)

    @property
    def score_fn(self):
        return None if self.mode is None else problem.score_of(self.mode, stateful=self.stateful)

    @property
    def score_has_aux(self):
        return self.has_aux and self.mode is None

    @property
    def optimiser(self):
        return (problem.OF_HYPER if self.hyper_used else problem.PLAIN)[self.optimiser_name]

    @property
    def trainable(self):
        return TRAINABLE[self.trained]

    @property
    def perturb(self):
        return problem.halve_rate if self.perturbs else None

    def fresh(self):
        return problem.fresh_of(stateful=self.stateful)(None)

    def follow(self, opt_state, hyper):
        """The optimiser state of a donor, which may hold the donor's learning rate."""
        if self.optimiser_name != "injected":
            return opt_state
        return eqx.tree_at(lambda state: state.hyperparams["learning_rate"], opt_state, hyper["lr"])

    # What members see.

    @property
    def num_rows(self):
        return problem.ROWS

    @property
    def rows_per_epoch(self):
        return self.own_rows or self.num_rows

    @property
    def batch_size(self):
        return min(self.given_batch_size or 32, self.rows_per_epoch)

    @property
    def per_epoch(self):
        return -(-self.rows_per_epoch // self.batch_size)

    @ft.cached_property
    def rows(self):
        """Rows of each member, with repetitions."""
        if self.own_rows is None:
            return None
        rng = np.random.default_rng(self.seed)
        return rng.integers(self.num_rows, size=(self.num_members, self.own_rows)).astype(np.int32)

    @ft.cached_property
    def data(self):
        return problem.arrays(1, self.num_rows, self.num_members, each=self.each)

    @ft.cached_property
    def validation(self):
        if self.validated_on is None:
            return None
        x, y, row = problem.arrays(2, 8, self.num_members, each=self.validated_on == "each")
        return x, y, np.full_like(row, -2)  # no row at which a loss fails

    def batch(self, i, rows):
        x, y, row = self.data
        return jnp.asarray(x[rows]), jnp.asarray((y[i] if self.each else y)[rows]), jnp.asarray(row[rows])

    def validated(self, i):
        x, y, row = map(jnp.asarray, self.validation)
        return x, y[i] if self.validated_on == "each" else y, row

    def stopping_at(self, step):
        return self.stops.get(step, [])

    def timed_out(self, run):
        """The members that a time limit stopped, which is at any step, by that step."""
        found = {}
        for i, seconds in enumerate(self.max_seconds or []):
            if seconds < 1 and run.status[i] == ee.train.Status.STOPPED:
                found.setdefault(int(run.stopped_at[i]), []).append(i)
        return found

    # The call of `fit`.

    def ensemble(self):
        """The ensemble and its state, members in a random order."""
        made = ee.build(problem.make_of(stateful=self.stateful), self.num_members, key=problem.KEY)
        made, state = made if self.stateful else (made, None)
        index = np.array(self.ids)
        return made[index], jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, state)

    def options(self):
        """The options that every call has, new and continued."""
        validation = self.validation
        if validation is not None and self.validated_on == "each":
            validation = validation[0], ee.Each(validation[1]), validation[2]
        options = {
            "validation": validation, "score": self.score_fn, "mode": self.mode, "patience": self.patience,
            "min_delta": self.min_delta, "target": self.target, "max_steps": self.max_steps, "has_aux": self.has_aux,
            "smooth": self.smooth, "max_seconds": self.max_seconds,
            "history": self.history, "on_diverge": self.on_diverge, "callback_every": self.callback_every,
        }  # fmt: skip
        if self.on_diverge in ("donor", "fresh"):
            make = problem.fresh_of(stateful=self.stateful) if self.on_diverge == "fresh" else None
            options["on_diverge"] = ee.train.Revive(make, perturb=self.perturb, most=self.most)
        plans = {"default": None, "2": ee.plan.Chunked(2), "3": ee.plan.Chunked(3)}
        plans |= {"sequential": ee.plan.Sequential(), "unrolled": ee.plan.Unrolled()}
        options["plan"] = plans[self.plan]
        if self.source in ("arrays", "numpy", "reader", "reading"):
            options |= {"rows": self.rows, "shuffle": self.shuffle, "batch_size": self.given_batch_size}
            options |= {"scan": self.scan} if self.source in ("arrays", "numpy") else {}
        options["mesh"] = None if self.mesh is None else ee.make_mesh(*self.mesh)
        return options | {"progress": False, "key": problem.KEY}

    def fit(self, begun, *, length, callbacks=(), **options):
        """One call, of an ensemble with its state or of what continues it."""
        if isinstance(begun, tuple):
            begun, state = begun
            options |= {"state": state, "hyper": self.hyper, "trainable": self.trainable}
        data = problem.source_of(self.source, self.data, self.batch_size, each=self.each)
        length = {"epochs": length // self.per_epoch} if self.in_epochs else {"steps": length}
        options = grouped(self.options() | options | length | {"callbacks": list(callbacks)})
        return ee.fit(begun, self.loss, self.optimiser, data, **options)


class Draw:
    """Random choices."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def maybe(self, probability):
        return bool(self.rng.random() < probability)

    def one_of(self, *options):
        return options[self.rng.integers(len(options))]

    def number(self, low, high):
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def subset(self, count, probability):
        return np.flatnonzero(self.rng.random(count) < probability).tolist()


def draw(seed):
    """The call of a seed."""
    d = Draw(seed)
    one_of, maybe, number = d.one_of, d.maybe, d.number
    source = one_of("arrays", "arrays", "arrays", "numpy", "list", "resumable", "generator", "reader", "reading")
    in_arrays = source in ("arrays", "numpy")
    chosen = in_arrays or source.startswith("read")
    count = one_of(4, 4, 4, 3)
    each = not source.startswith("read") and maybe(0.3)
    own_rows = one_of(12, 8) if chosen and maybe(0.3) else None
    batch_size = one_of(None, 4, 5, 12)
    per_epoch = -(-(own_rows or problem.ROWS) // min(batch_size or 32, own_rows or problem.ROWS))
    hyper = maybe(0.5)
    validated_on = one_of("shared", "each") if maybe(0.6) else None
    validated = validated_on is not None
    mode = one_of(None, "min", "max") if validated else None
    patience = number(1, 3) if validated and maybe(0.5) else None
    sign = -1 if mode == "max" else 1
    target = None
    if validated and maybe(0.3):
        target = [sign * round(float(x), 2) for x in d.rng.uniform(0.0, 1.0, count)]
        target = target[0] if maybe(0.3) else target
    faults = [number(0, 11) if i in d.subset(count, 0.4) and hyper else -1 for i in range(count)]
    on_diverge = one_of("freeze", "freeze", "raise", "donor", "fresh") if hyper else one_of("freeze", "raise")
    how = one_of("whole", "whole", "continue", "continue", "state", "checkpoint", "interrupt", "error")
    if source == "generator" or on_diverge == "raise":
        how = "whole"
    epochs = 1 if source == "generator" else number(1, 5)
    total = epochs * per_epoch
    in_epochs = source == "generator" or (how in ("whole", "interrupt", "error") and maybe(0.5))
    if not in_epochs and maybe(0.6):
        total = max(total - number(0, per_epoch - 1), per_epoch if patience else 1)
    # A training state does not hold the position of an iterable: a run that continues it starts an epoch.
    whole = (source == "list" and how in ("continue", "state")) or (source == "resumable" and how == "state")
    cuts = cut(d, total, per_epoch, whole_epochs=whole, patience=patience)
    lengths = [total] if how not in ("continue", "state", "checkpoint") else cuts
    callback_every = one_of(None, 1, 2, 3)
    stops = {}
    if callback_every and maybe(0.4):
        stops[callback_every * number(1, 3)] = d.subset(count, 0.4)
    ends_at = None
    if how == "error":
        stops = {}  # a callback that raises hides what others say
    if callback_every and how in ("interrupt", "error"):
        ends_at = callback_every * number(1, 3)
    elif callback_every and how == "whole" and maybe(0.1):
        ends_at = callback_every * number(1, 3)
    max_steps = one_of(number(1, total + 2), [number(1, total + 2) for _ in range(count)]) if maybe(0.25) else None
    return Call(
        seed=seed, source=source, num_members=count, ids=d.rng.permutation(count).tolist(), stateful=maybe(0.3),
        has_aux=maybe(0.4), hyper_used=hyper,
        optimiser_name=one_of(*(problem.OF_HYPER if hyper else problem.PLAIN)), trained=one_of("all", "all", "vectors"),
        each=each, own_rows=own_rows, shuffle=one_of(True, True, "shared", False) if chosen else False,
        given_batch_size=batch_size, validated_on=validated_on, mode=mode, patience=patience,
        min_delta=one_of(0.0, 0.03) if validated else 0.0, target=target, max_steps=max_steps,
        max_seconds=[one_of(1e-9, 1e9) for _ in range(count)] if how == "whole" and maybe(0.15) else None,
        history=one_of("all", "all", "last", 2, 3), on_diverge=on_diverge, faults=faults, scale=one_of(0.0, 1e30),
        perturbs=maybe(0.6), most=number(1, 3),
        plan=one_of("default", "default", "2", "3", "sequential", "unrolled"),
        scan=one_of(None, None, True, False) if in_arrays else None,
        mesh=one_of((2, 1), (4, 1), (2, 2), (1, 2)) if maybe(0.15) else None, callback_every=callback_every,
        stops=stops, ends_at=ends_at, how=how, lengths=lengths, in_epochs=in_epochs,
        checkpoint_every=one_of(None, None, 1, 2, 3),
        smooth=one_of(0.0, 0.0, 0.5, 0.9) if validated else 0.0,
    )  # fmt: skip


def cut(d, total, per_epoch, *, whole_epochs, patience):
    """`total` in random parts, or in steps; each of whole epochs if needed, or at least as long as one."""
    if whole_epochs:
        return [per_epoch] * (total // per_epoch) + [total % per_epoch] * (total % per_epoch > 0 and patience is None)
    if patience is None and d.maybe(0.3):
        return [1] * total
    least, parts = per_epoch if patience else 1, []
    while total - sum(parts) >= 2 * least and len(parts) < 3:
        parts.append(d.number(least, total - sum(parts) - least))
    return [*parts, total - sum(parts)]
