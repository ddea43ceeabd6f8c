"""Inactive members leave the compiled arrays, without effect on the results."""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status
from eqx_ensemble.train.data._rows import Slots
from eqx_ensemble.train.host import _loop as _pacing
from eqx_ensemble.train.host._active import ActiveMembers, width_for
from eqx_ensemble.train.host._loop import Pacing

from ..factories import assert_same_where_optimised

MEMBERS, ROWS, BATCH = 11, 22, 8
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (ROWS, 3))
Y = jnp.sin(X[:, :1])
VALIDATION = (X[:7] + 0.1, Y[:7])
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), ids=range(20, 20 + MEMBERS), key=KEY)
HYPER = {"rate": np.geomspace(0.02, 3.0, MEMBERS).astype(np.float32)}


def optimiser(h):
    return optax.sgd(h["rate"], momentum=0.9)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
    value = jnp.mean((jax.vmap(model)(x) - y) ** 2)
    return value, {
        "double": 2 * value,
        "rows": len(x),
    }


def batches():
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]


def own(x):
    return ee.Each(jnp.stack([x + 0.01 * i for i in range(MEMBERS)]))


CASES = {
    "own rows": {"data": (X, Y)},
    "rows in the given order": {"data": (X, Y), "shuffle": False},
    "shared rows": {"data": (X, Y), "shuffle": "shared"},
    "a bootstrap": {"data": (X, Y), "rows": np.random.default_rng(0).integers(0, ROWS, (MEMBERS, 15))},
    "data of their own": {"data": (own(X), Y), "validation": (own(VALIDATION[0]), VALIDATION[1])},
    "smoothed scores": {"data": (X, Y), "validation": ee.train.Validation(VALIDATION, smooth=0.5)},
    "one batch": {"data": (X, Y), "batch_size": ROWS},
    "an iterable": {"data": batches(), "batch_size": None},
    "an iterable of their own": {"data": [(own(x), y) for x, y in batches()], "batch_size": None},
    "chunks of members": {"data": (X, Y), "plan": ee.plan.Chunked(3)},
}


def fitted(data, **options):
    options = {"validation": VALIDATION, "batch_size": BATCH, "patience": 2, "epochs": 12} | options
    return ee.fit(ENSEMBLE, loss, optimiser, data, hyper=HYPER, has_aux=True, key=KEY, **options)


@pytest.fixture
def widths(monkeypatch):
    """Shrinks whenever possible, and records the widths."""
    seen = []
    shrink = ActiveMembers.shrink

    def noted(self, width):
        seen.append(width)
        shrink(self, width)

    monkeypatch.setattr(_pacing, "_FIRST_STEPS", 1)  # a boundary after every step
    monkeypatch.setattr(_pacing, "_SECONDS_PER_CHUNK", 0.0)
    monkeypatch.setattr(Pacing, "pays", lambda self, width, before, steps_left: width < before)
    monkeypatch.setattr(ActiveMembers, "shrink", noted)
    return seen


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_leaving_is_invisible(case, widths, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Pacing, "pays", lambda *_: False)
        expected = fitted(**CASES[case])
    assert not widths
    run = fitted(**CASES[case])
    assert widths == sorted(widths, reverse=True)
    assert 4 <= min(widths) <= 6, "few members stopped, which shows little"
    assert len(set(expected.stopped_at.tolist())) > 2, "members that stop together show little"
    got, wanted = (eqx.filter(run, eqx.is_array_like) for run in (run, expected))
    assert_same_where_optimised(got, wanted)
    assert run.status.tolist() == expected.status.tolist()
    for i in np.flatnonzero(run.stopped_at >= 0):
        gone = run.stopped_at[i] + (run.status[i] == Status.DIVERGED)  # the step of a fault is reported
        assert np.isnan(run.history.aux["double"][i, gone:]).all()
        assert not run.history.aux["rows"][i, gone:].any()


@pytest.mark.parametrize(
    ("plan", "least"), [(ee.plan.Vmap(), 4), (ee.plan.Chunked(3), 6), (ee.plan.Sequential(), 4)], ids=repr
)
def test_one_compile_for_every_width(plan, least, widths, compiled):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=KEY)
    hyper = {"rate": np.array([0.01, 0.02, 0.03, 0.7, 0.8, 0.9, 1.0, 1.1], np.float32)}
    validation = X[:7] + 1.0, Y[:7]
    own_loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    def stopping():
        return ee.fit(
            ensemble, own_loss, optimiser, (X, Y), hyper=hyper, validation=validation, batch_size=11, patience=2,
            epochs=12, plan=plan, key=KEY,
        )  # fmt: skip

    with compiled() as programs:
        run = stopping()
    assert widths[-1] == least
    assert programs.count("run_chunk") == 1 + len(widths)
    with compiled() as programs:
        again = stopping()
    assert programs == []
    assert again.stopped_at.tolist() == run.stopped_at.tolist()


def test_it_takes_what_pays():
    """By the time that is left, the time to compile, and how time depended on the number of members before."""
    pacing = Pacing(ee.plan.Vmap)
    pacing.measure(1, 4.5, width=11)  # of which the compiler took most
    pacing.measure(1, 1.0, width=11)
    assert not pacing.pays(11, 11, 10**9), "no member has left"
    assert pacing.pays(6, 11, 10)
    assert not pacing.pays(6, 11, 9)
    pacing.measure(1, 1.0, width=6)  # half the members took as long as all: the machine idles
    assert not pacing.pays(3, 6, 10**9)


def test_a_program_that_had_to_be_compiled_shows_the_cost():
    """The first program may have been there from a run before, while those of smaller widths are not."""
    pacing = Pacing(ee.plan.Vmap)
    for _ in range(2):
        pacing.measure(1, 1.0, width=12)
    assert pacing.pays(6, 12, 10)
    pacing.restart()
    pacing.measure(1, 9.0, width=6)  # of which a step takes at most one
    pacing.measure(1, 0.5, width=6)
    assert not pacing.pays(3, 6, 30)
    assert pacing.pays(3, 6, 34)


def test_a_later_run_knows_which_programs_are_compiled():
    first, later = (Pacing(ee.plan.Vmap) for _ in range(2))
    first.recall("a program")
    for seconds in (9.0, 1.0):
        first.measure(1, seconds, width=12)
    first.restart()
    first.measure(1, 1.0, width=6)
    later.recall("a program")
    later.measure(1, 1.0, width=12)  # at once at its pace
    assert later.pays(6, 12, 1)
    assert not later.pays(4, 12, 13)
    assert later.pays(4, 12, 14)


@pytest.mark.parametrize(("members_stop", "steps"), [(False, 100), (True, 20)])
def test_chunks_are_shorter_where_members_stop(members_stop, steps):
    """A chunk is a second's steps, or a fifth of that: what has stopped is noticed between chunks."""
    pacing = Pacing(ee.plan.Vmap, members_stop=members_stop)
    for _ in range(3):  # the first one compiles
        pacing.measure(100, 1.0, width=4)
    assert pacing.steps == steps


@pytest.mark.parametrize(
    ("plan", "training", "width"),
    [
        (ee.plan.Vmap(), 54, 54),
        (ee.plan.Vmap(), 44, 54),
        (ee.plan.Vmap(), 43, 43),
        (ee.plan.Vmap(), 5, 6),
        (ee.plan.Vmap(), 1, 4),
        (ee.plan.Sequential(), 33, 43),
        (ee.plan.Chunked(5), 33, 45),
        (ee.plan.Chunked(5), 32, 35),
        (ee.plan.Chunked(100), 32, 32),
    ],
)
def test_widths(plan, training, width):
    status = jnp.where(jnp.arange(64) < training, Status.OK, Status.STOPPED)
    members = ActiveMembers.__new__(ActiveMembers)
    members.slots, members.carry = (
        Slots(np.arange(64), 64, None),
        types.SimpleNamespace(moving=types.SimpleNamespace(status=status)),
    )
    assert width_for(members, plan) == width
