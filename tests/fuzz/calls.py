"""Random calls of `fit`."""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee

from ..train.reference import Member, key_of_member
from . import problem

HUGE = 1e30  # a rate at which a member diverges
PLANS = {"default": None, "vmap": ee.plan.Vmap(), **{f"blocks {n}": ee.plan.Blocks(n) for n in (1, 2, 3, 4)}}
TRAINABLE = {
    "all": lambda path: True,
    "matrices": lambda path: path.endswith("weight"),
    "head": lambda path: path.startswith(".out"),
}


def halve(hyper):
    return hyper | {"lr": hyper["lr"] * 0.5}


def of_members(tree, index):
    """What some members see of data."""
    is_each = lambda x: isinstance(x, ee.Each)
    return jax.tree.map(lambda x: ee.Each(x.value[np.array(index)]) if is_each(x) else x, tree, is_leaf=is_each)


@dataclasses.dataclass
class Call:
    """What is drawn. `how` is one of the ways of `test_fit`, `lengths` the steps of its calls."""

    seed: int
    members: int
    stateful: bool
    shared: bool
    has_aux: bool
    hyper_used: bool
    huge: list[int]
    optimiser: str
    trained: str
    num_rows: int
    own_rows: int | None
    own_data: bool
    source: str
    batch_size: int | None
    shuffle: bool
    validated: str | None
    mode: str | None
    patience: int | None
    min_delta: float
    target: Any
    most: Any
    halves: bool
    told: int | None
    history: str
    plan: str
    mesh: tuple[int, int] | None
    how: str
    lengths: list[int]
    in_epochs: bool
    saves_every: int | None
    fails_at: int
    broken: int | None
    longest: int
    some: list[int]

    @property
    def count(self):
        """The rows of an epoch."""
        return self.own_rows or self.num_rows

    @property
    def epoch(self):
        """The steps of an epoch."""
        return -(-self.count // min(self.batch_size or 32, self.count))

    @property
    def sign(self):
        return -1 if self.mode == "max" else 1

    @ft.cached_property
    def rng(self):
        return np.random.default_rng(self.seed)

    @ft.cached_property
    def begun(self):
        """The ensemble and its state, members in an order of their own."""
        ensemble, state = problem.ensemble(stateful=self.stateful, shared=self.shared)
        index = self.rng.permutation(problem.MOST)[: self.members]
        return ensemble[index], None if state is None else ee.tree.take(state, index)

    @ft.cached_property
    def hyper(self):
        if not self.hyper_used:
            return None
        rates = np.linspace(0.01, 0.1, self.members).astype(np.float32)
        rates[[i for i in self.huge if i < self.members]] = HUGE
        return {"lr": rates, "decay": np.linspace(0, 0.1, self.members).astype(np.float32)}

    @ft.cached_property
    def rows(self):
        if self.own_rows is None:
            return None
        return self.rng.integers(self.num_rows, size=(self.members, self.own_rows)).astype(np.int32)

    def arrays(self, seed, rows, *, own):
        x, y = problem.arrays(seed, rows, own=own)
        return (x, ee.Each(y[: self.members])) if own else (x, y)

    @ft.cached_property
    def data(self):
        x, y = self.arrays(1, self.num_rows, own=self.own_data)
        if self.own_data and self.broken is not None:
            y = np.array(y.value)
            y[self.broken % self.members, self.broken % self.num_rows] = np.nan
            return x, ee.Each(y)
        return x, y

    @ft.cached_property
    def validation(self):
        return None if self.validated is None else self.arrays(2, 8, own=self.validated == "own")

    @ft.cached_property
    def batches(self):
        """The batches of a pass, the last one smaller."""
        size = min(self.batch_size or 32, self.num_rows)
        x, y = self.data
        cut = lambda y, i: y[..., i : i + size]
        one = lambda i: (x[i : i + size], ee.Each(cut(y.value, i)) if self.own_data else cut(y, i))
        return [one(i) for i in range(0, self.num_rows, size)]

    @property
    def loss(self):
        return problem.loss_of(stateful=self.stateful, has_aux=self.has_aux, hyper=self.hyper_used)

    @property
    def score(self):
        return None if self.mode is None else problem.score_of(self.mode, stateful=self.stateful)

    @property
    def made_optimiser(self):
        return (problem.OF_HYPER if self.hyper_used else problem.PLAIN)[self.optimiser]

    @ft.cached_property
    def trainable(self):
        model = problem.ensemble(stateful=self.stateful, shared=self.shared)[0].stacked
        chosen = TRAINABLE[self.trained]
        keep = lambda path, x: eqx.is_inexact_array(x) and chosen(jax.tree_util.keystr(path))
        return jax.tree_util.tree_map_with_path(keep, model)

    # The call of `fit`.

    def options(self, index):
        """The options for the members `index`."""
        validation = of_members(self.validation, index)
        if validation is not None:
            validation = ee.train.Validation(
                validation, score=self.score, mode=self.mode if self.score else None, min_delta=self.min_delta
            )
        stop = None
        if self.target is not None or self.most is not None:
            part = lambda x: [x[i] for i in index] if isinstance(x, list) else x
            stop = ee.train.Stopping(target=part(self.target), steps=part(self.most))
        options = {
            "validation": validation, "patience": self.patience, "stop": stop, "has_aux": self.has_aux,
            "history": self.history, "plan": PLANS[self.plan], "progress": False,
            "mesh": None if self.mesh is None else ee.make_mesh(*self.mesh),
        }  # fmt: skip
        if self.source == "arrays":
            options |= {
                "batch_size": self.batch_size,
                "rows": None if self.rows is None else self.rows[index],
                "shuffle": self.shuffle,
            }
        return options

    def callback(self, state):
        """Halves rates and stops members, as drawn."""
        if self.halves:
            state = eqx.tree_at(lambda state: state.hyper, state, halve(state.hyper))
        if self.told is not None:
            state = state.stop(state.step >= self.told)
        return state

    def fit(self, begun, length, *, index=None, callbacks=(), **options):
        """One call, of an ensemble and its state, or of what continues it, for the members `index`."""
        index = list(range(self.members)) if index is None else index
        if isinstance(begun, tuple):
            begun, state = begun
            options |= {"state": state, "hyper": self.hyper, "trainable": self.trainable, "key": problem.KEY}
        data = of_members(self.data if self.source == "arrays" else self.batches, index)
        data = problem.Loader(data) if self.source == "loader" else data
        callbacks = [*([self.callback] if self.halves or self.told else []), *callbacks]
        in_epochs = self.in_epochs and length % self.epoch == 0
        length = {"epochs": length // self.epoch} if in_epochs else {"steps": length}
        return ee.fit(
            begun, self.loss, self.made_optimiser, data, callbacks=callbacks, **(self.options(index) | length | options)
        )

    # The plain loop.

    def alone(self, i, lengths):
        """Member `i`, trained alone in several calls of these lengths, until it has stopped."""
        own = lambda tree: jax.tree.map(
            lambda x: x.value[i] if isinstance(x, ee.Each) else x, tree, is_leaf=lambda x: isinstance(x, ee.Each)
        )
        model, state = self.begun[0][i], None if self.begun[1] is None else ee.tree.take(self.begun[1], i)
        trained = self.trainable
        if self.shared:
            trained = eqx.tree_at(lambda m: m.first, trained, jax.tree.map(lambda _: False, trained.first))
        hyper = None if self.hyper is None else jax.tree.map(lambda x: jnp.asarray(x[i]), self.hyper)
        member = Member(
            self.loss, self.made_optimiser, hyper=hyper, score=self.score, has_aux=self.has_aux, trainable=trained
        )
        most = None if self.most is None else int(np.broadcast_to(self.most, self.members)[i])
        target = None if self.target is None else float(np.broadcast_to(self.target, self.members)[i])
        now = member.begin(model, state, self.mode or "min")
        for length in lengths:
            if self.how == "state":  # which holds no curves
                now = dataclasses.replace(now, losses=[], means=[], auxs=[], scores=[])
            now = member.fit(
                now, own(self.data), steps=length, key=key_of_member(problem.KEY, i), batch_size=self.batch_size or 32,
                rows=None if self.rows is None else self.rows[i], shuffle=self.shuffle,
                validation=own(self.validation), patience=self.patience, mode=self.mode or "min",
                min_delta=self.min_delta, target=target, most=most, told=self.told, longest=self.longest,
                batches=None if self.source == "arrays" else [own(batch) for batch in self.batches],
                decay=halve if self.halves else None,
            )  # fmt: skip
        return now


def draw(seed):
    """The call of a seed."""
    rng = np.random.default_rng(seed)
    one_of = lambda *options: options[rng.integers(len(options))]
    maybe = lambda probability: bool(rng.random() < probability)
    number = lambda low, high: int(rng.integers(low, high + 1))
    subset = lambda count, probability: np.flatnonzero(rng.random(count) < probability).tolist()
    members, source = one_of(1, 2, 3, 4, 5, 7), one_of("arrays", "arrays", "arrays", "list", "loader")
    num_rows, batch_size = one_of(5, 12, 20, 64, 70), one_of(None, 4, 5, 8, 100)
    own_rows = one_of(3, 12, 64) if source == "arrays" and maybe(0.3) else None
    hyper, validated = maybe(0.6), one_of(None, "same", "own")
    mode = one_of(None, "min", "max") if validated else None
    sign = -1 if mode == "max" else 1
    each = lambda make: make() if maybe(0.3) else [make() for _ in range(members)]
    call = Call(
        seed=seed, members=members, stateful=maybe(0.3), shared=maybe(0.25), has_aux=maybe(0.4), hyper_used=hyper,
        huge=subset(members, 0.25) if maybe(0.5) else [], optimiser=one_of("momentum", "adam"),
        trained=one_of("all", "all", "matrices", "head"), num_rows=num_rows, own_rows=own_rows, own_data=maybe(0.3),
        source=source, batch_size=batch_size, shuffle=maybe(0.7) or source != "arrays", validated=validated, mode=mode,
        patience=number(1, 3) if validated and maybe(0.5) else None, min_delta=one_of(0.0, 0.02) if validated else 0.0,
        target=each(lambda: sign * float(rng.uniform(0.1, 0.8))) if validated and maybe(0.3) else None,
        most=None, halves=hyper and maybe(0.2), told=None, history=one_of("steps", "steps", "epochs"),
        plan=one_of(*PLANS), mesh=one_of((2, 1), (4, 1), (2, 2), (1, 2), (1, 4)) if maybe(0.15) else None,
        how=one_of("whole", "whole", "run", "state", "some", "checkpoint", "checkpoint"), lengths=[],
        in_epochs=maybe(0.5), saves_every=one_of(None, 1, 2), fails_at=number(1, 4),
        broken=one_of(None, None, number(0, 99)), longest=one_of(512, 512, 3), some=[],
    )  # fmt: skip
    total = number(1, 6) * call.epoch
    total = min(total, max(40 // call.epoch, 2) * call.epoch)
    call.in_epochs = call.in_epochs and call.how in ("whole", "checkpoint")
    if not call.in_epochs and maybe(0.5):
        total = max(total - number(0, call.epoch - 1), 1)
    call.lengths = [total]
    if call.how in ("run", "state", "some"):
        call.lengths = [number(1, total), number(1, total), number(1, total)][: number(2, 3)]
        call.some = rng.permutation(members)[: number(1, members)].tolist()
    call.most = each(lambda: number(1, total + 2)) if maybe(0.25) else None
    call.told = number(1, total) if maybe(0.2) else None
    return call
