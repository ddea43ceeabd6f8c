"""Random calls of `fit`, beside a plain loop of Equinox and optax over single members."""

import dataclasses
import functools as ft
import math
import warnings
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status, _fit

from ..factories import assert_same_where_optimised
from .problem import KEY, OPTIMISERS, Net, data_of, loss_of, score_of
from .reference import Reference
from .seeds import seeds

SURE = 1e-4  # a score this close to a threshold may fall on either side
EXPECTED = "diverged|are NaN"


@dataclasses.dataclass
class Call:
    """The options of one call, as drawn."""

    num_members: int
    num_rows: int
    batch_size: int
    lengths: list  # steps or epochs of each call
    unit: str
    kind: str
    data: Any
    each: bool
    rows: Any
    shuffle: bool
    validation: Any
    validation_each: bool
    mode: str
    min_delta: float
    patience: Any
    target: Any
    most: Any
    hyper: Any
    optimiser: Any
    trainable: Any
    has_aux: bool
    stateful: bool
    history: str
    plan: Any
    mesh: Any
    on_diverge: str
    own_keys: bool
    through: str
    longest: int

    @property
    def epoch(self):
        return math.ceil((self.num_rows if self.rows is None else self.rows.shape[1]) / self.batch_size)

    def batch(self, i, rows):
        x, y, row = self.data
        return x[rows], (y[i] if self.each else y)[rows], row[rows]

    def validated(self, i):
        x, y, row = self.validation
        return x, y[i] if self.validation_each else y, row

    def steps(self):
        return [n if self.unit == "steps" else n * self.epoch for n in self.lengths]

    def given(self):
        x, y, row = self.data
        mark = ee.Each if self.each else lambda y: y
        if self.kind == "arrays":
            return x, mark(y), row
        parts = [slice(i, i + self.batch_size) for i in range(0, self.num_rows, self.batch_size)]
        return [(x[part], mark(y[..., part]), row[part]) for part in parts]


def draw(seed):
    """The call of a seed."""
    rng = np.random.default_rng(seed)
    maybe = lambda chance=0.5: bool(rng.random() < chance)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    num_members = pick(1, 2, 3, 4, 5)
    batch_size = pick(1, 3, 4, 8)
    kind = pick("arrays", "arrays", "arrays", "batches")
    num_rows = (
        batch_size * pick(1, 2, 3) if kind == "batches" else pick(*(n for n in (5, 8, 12, 70) if n >= batch_size))
    )
    arrays = kind == "arrays"
    each, validates = maybe(), maybe(0.6)
    rows = None
    if arrays and maybe(0.3):
        rows = rng.integers(num_rows, size=(num_members, rng.integers(batch_size, 13))).astype(np.int32)
    unit = pick("steps", "epochs")
    most = pick(1, 2, 4) if unit == "epochs" else pick(1, 5, 14)
    lengths = [int(rng.integers(1, most + 1)) for _ in range(pick(1, 1, 2))]
    if num_rows == 70 and unit == "epochs":
        lengths = [1] * len(lengths)
    validation_each, mode = maybe(0.3), pick("min", "max")
    hyper = None
    if maybe():
        risk = rng.choice([0.0, 0.1, 0.5], size=num_members).astype(np.float32)
        hyper = {"rate": rng.uniform(0.01, 0.1, num_members).astype(np.float32), "risk": risk}
        if maybe(0.2):
            hyper["rate"][0] = 1e30
    make = OPTIMISERS[pick(*OPTIMISERS)]
    validation = data_of(6, num_members, rng, each=validation_each) if validates else None
    data = data_of(num_rows, num_members, rng, each=each)
    if each and maybe(0.2):
        data[1][0, rng.integers(num_rows)] = np.nan
    mesh = pick(*[None] * 4, (2, 1), (4, 1), (2, 2))
    return Call(
        num_members, num_rows, batch_size, lengths, unit, kind, data, each, rows,
        shuffle=not arrays or maybe(0.7), validation=validation, validation_each=validation_each,
        mode=mode if validates else "min", min_delta=pick(0.0, 0.05) if validates else 0.0,
        patience=pick(None, 1, 2) if validates else None,
        target=pick(None, 1.0) if validates and mode == "min" else None,
        most=pick(None, None, rng.integers(1, 9, num_members)), hyper=hyper,
        optimiser=(lambda h: make(h["rate"])) if hyper else make(0.05),
        trainable=pick(eqx.is_inexact_array, lambda x: eqx.is_inexact_array(x) and x.ndim >= 1 and x.shape[-1] > 1),
        has_aux=maybe(0.3), stateful=maybe(0.3), history=pick("steps", "epochs"),
        plan=pick(None, ee.plan.Vmap(), ee.plan.Blocks(1), ee.plan.Blocks(2), ee.plan.Blocks(3, cores=2)), mesh=mesh,
        on_diverge=pick("freeze", "freeze", "raise"), own_keys=maybe(0.3), through=pick("run", "state", "index"),
        longest=pick(512, 512, 3),
    )  # fmt: skip


def start_of(call):
    make = lambda key: Net(key, call.stateful)
    if call.stateful:
        return ee.build(eqx.nn.make_with_state(make), call.num_members, key=KEY)
    return ee.build(make, call.num_members, key=KEY), None


def fit(call, start, state, length, **options):
    named = {call.unit: length, "has_aux": call.has_aux, "history": call.history, "plan": call.plan}
    if call.kind == "arrays":
        named |= {"batch_size": call.batch_size, "rows": call.rows, "shuffle": call.shuffle}
    if call.mesh is not None:
        named["mesh"] = ee.make_mesh(*call.mesh)
    if call.validation is not None:
        x, y, row = call.validation
        score = score_of(stateful=call.stateful) if call.mode == "max" else None
        given = x, ee.Each(y) if call.validation_each else y, row
        named["validation"] = ee.train.Validation(given, score=score, mode=call.mode, min_delta=call.min_delta)
        named["patience"] = call.patience
    if call.most is not None or call.target is not None:
        named["stop"] = ee.train.Stopping(steps=call.most, target=call.target)
    if isinstance(start, ee.Ensemble):
        named |= {"state": state, "hyper": call.hyper, "trainable": call.trainable}
    loss = loss_of(stateful=call.stateful, has_aux=call.has_aux, hyper=call.hyper is not None)
    return ee.fit(start, loss, call.optimiser, call.given(), on_diverge=call.on_diverge, **named, **options)


def ours(call, key, **options):
    """The last run of a call, and how many of its lengths it trained."""
    ensemble, state = start_of(call)
    begun = (ensemble, state)
    run, trained = ensemble, 0
    for length in call.lengths:
        own = {"key": key} if trained == 0 else {}
        try:
            run = fit(call, run, begun[1], length, **own, **options)
        except ee.train.DivergedError as error:
            return error.run, trained + 1, True
        trained += 1
        if (run.status != Status.OK).all():
            break
        if trained < len(call.lengths):
            run = run.train_state if call.through == "state" else run[:] if call.through == "index" else run
    return run, trained, False


def check(seed, monkeypatch):
    call = draw(seed)
    monkeypatch.setattr(_fit, "_LONGEST_PART", call.longest)
    keys = ee.member_keys(KEY, call.num_members, purpose="fit")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*({EXPECTED})")
        run, trained, raised = ours(call, keys if call.own_keys else KEY)
    ensemble, state = start_of(call)
    states = [None] * call.num_members if state is None else ee.tree.unstack(state)
    expected = Reference(call, ensemble.unstack(), states, keys)
    if call.kind == "batches":
        call.shuffle = False
    for number, length in enumerate(call.steps()[:trained]):
        if raised and number == trained - 1:
            done = 0
            while done < length and not any(m.status == Status.DIVERGED for m in expected.members):
                done = expected.part(done, length)
        else:
            expected.run(length)
        if number == 0 and call.through == "state" and trained > 1:
            for member in expected.members:
                member.losses, member.aux, member.scores = [], [], []
    if expected.margin < SURE:
        return False
    compare(call, run, expected)
    return True


def close(got, wanted, name):
    got, wanted = np.asarray(got, float), np.asarray(wanted, float)
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5, err_msg=name)


def compare(call, run, expected):
    members = expected.members
    assert run.status.tolist() == [m.status for m in members]
    assert np.asarray(run.train_state.step).tolist() == [m.step for m in members]
    for i, m in enumerate(members):
        model, own = run.train_state.ensemble[i], run.train_state[i]
        trees = [(model, eqx.combine(m.params, m.frozen), "weights")]
        row = ft.partial(jax.tree.map, lambda x, i=i: x[i])
        trees += [(row(run.train_state.opt_state), m.opt_state, "moments")]
        if call.stateful:
            trees += [(row(run.train_state.model_state), m.state, "state")]
        if call.validation is not None:
            if m.best is not None:
                trees += [(run.ensemble[i], eqx.combine(m.best[0], m.frozen), "best weights")]
                close(run.best_score[i] * (-1 if call.mode == "max" else 1), m.best_score, "best score")
            assert run.best_step[i] == m.best_step
            assert int(own.waited[0]) == m.waited
        else:
            trees += [(run.ensemble[i], eqx.combine(m.params, m.frozen), "weights of the run")]
        for got, wanted, name in trees:
            for x, y in zip(
                jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)),
                jax.tree.leaves(eqx.filter(wanted, eqx.is_inexact_array)), strict=True,
            ):  # fmt: skip
                close(x, y, f"{name} of member {i}")
    if call.history == "steps":
        curves = np.array([m.losses for m in members])
        length = curves.shape[1]
        close(np.where(np.isfinite(run.history.loss), run.history.loss, np.nan)[:, :length],
              np.where(np.isfinite(curves), curves, np.nan), "losses")  # fmt: skip
        assert run.history.loss.shape[1] == length
        if call.has_aux:
            for i, m in enumerate(members):
                wanted = [(0, np.nan) if x is None else (int(x["row"]), float(x["mean"])) for x in m.aux]
                finite = np.isfinite(curves[i])
                rows, means = np.array(wanted).T
                assert (run.history.aux["row"][i][finite] == rows[finite]).all()
                close(run.history.aux["mean"][i][finite], means[finite], "aux")
    if call.validation is not None:
        close(run.history.validation, np.array([m.scores for m in members]), "scores")


def test_random_calls_are_the_loop_over_members(monkeypatch):
    compared = [check(seed, monkeypatch) for seed in seeds(default=6)]
    assert any(compared)


@pytest.mark.filterwarnings(f"ignore:.*({EXPECTED})")
def test_plans_agree_bit_for_bit_with_blocks_of_one_size(monkeypatch):
    """Whichever other members there are."""
    call = dataclasses.replace(draw(3), plan=ee.plan.Blocks(1), mesh=None, on_diverge="freeze")
    monkeypatch.setattr(_fit, "_LONGEST_PART", call.longest)
    run, *_ = ours(call, KEY)
    again, *_ = ours(dataclasses.replace(call, plan=ee.plan.Blocks(1, cores=1)), KEY)
    assert_same_where_optimised(run.ensemble, again.ensemble)


def test_other_rows_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Reference, "rows", lambda self, i, member, step: np.arange(self.call.batch_size))
    plain = lambda call: call.kind == "arrays" and call.shuffle and call.epoch > 1 and call.validation is None
    with pytest.raises(AssertionError):
        check(next(seed for seed in range(99) if plain(draw(seed)) and draw(seed).hyper is None), monkeypatch)
