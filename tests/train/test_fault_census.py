"""One member fails, in every way there is, under every optimiser and every plan; no bit of the others changes."""

import functools
import zlib
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status
from eqx_ensemble.train.compiled import _chunk

from ..factories import numbers
from .optax_cases import NOT_TRAINED, PUBLIC, TRAINED, optimiser

MEMBERS, STEPS, BATCH = 4, 8, 4  # a chunk is four pieces of two steps, which are judged as a whole
ROWS = STEPS * BATCH
KEY = jax.random.key(5)

PLANS = {
    "vmap": ee.plan.Vmap(),
    "chunked": ee.plan.Chunked(2),
    "sequential": ee.plan.Sequential(),
    "unrolled": ee.plan.Unrolled(),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")


class Layer(eqx.Module):
    """A matrix and a vector, which is all that optimisers distinguish."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.weight = jax.random.normal(k1, (4, 6)) / 2
        self.bias = jax.random.normal(k2, (6,)) / 2

    def __call__(self, x):
        return jnp.tanh(x @ self.weight + self.bias)


class Fault(NamedTuple):
    """The fault of one member, and its step; `kind` is one of `KINDS`."""

    kind: str
    member: int
    step: int
    value: float = np.nan
    leaf: str = "weight"
    row: int = 0


KINDS = ["loss", "gradient", "weights", "data"]


def drawn(kind, *names):
    """A fault at a moment of its own for every test."""
    rng = np.random.default_rng(zlib.crc32("/".join((kind, *names)).encode()))
    step = 0 if kind == "weights" else int(rng.integers(STEPS))
    value, leaf = rng.choice([np.nan, np.inf, -np.inf]), str(rng.choice(["weight", "bias"]))
    return Fault(kind, int(rng.integers(MEMBERS)), step, value, leaf, int(rng.integers(BATCH)))


def kink(model, here):
    """Zero everywhere; `here`, its gradient by every weight is NaN: a root has an infinite slope at 0."""
    total = jnp.sum(model.weight) + jnp.sum(model.bias)
    root = jnp.sqrt(jnp.where(here, 0 * total, 1.0))
    return root - jax.lax.stop_gradient(root)


def loss(model, batch, key, hyper):
    """Every fault is stored in arrays, so that one compiled program serves all. Reports the weights before the step."""
    x, y, quality, step = batch
    now = step[0] == hyper["step"]
    x = x * jnp.sqrt(quality)[:, None]
    value = jnp.mean((jax.vmap(model)(x) - y) ** 2)
    return value + jnp.where(now, hyper["added"], 0.0) + kink(model, now & hyper["kink"]), model


@functools.cache
def ensemble():
    return ee.build(Layer, MEMBERS, key=jax.random.key(0))


@functools.cache
def dataset():
    """Inputs for all, targets of the members' own, of scales of their own."""
    kx, ky = jax.random.split(jax.random.key(1))
    scales = np.array([0.3, 1.0, 4.0, 2.0], np.float32).reshape(MEMBERS, 1, 1)
    return jax.random.normal(kx, (ROWS, 4)), jax.random.normal(ky, (MEMBERS, ROWS, 6)) * scales


def fitted(optimiser, plan, fault=None, *, models=None):
    models = ensemble() if models is None else models
    quality = np.ones((MEMBERS, ROWS), np.float32)
    hyper = {"step": np.full(MEMBERS, -1), "added": np.zeros(MEMBERS, np.float32), "kink": np.zeros(MEMBERS, bool)}
    if fault is not None:
        hyper["step"][fault.member] = fault.step
        match fault.kind:
            case "loss":
                hyper["added"][fault.member] = fault.value
            case "gradient":
                hyper["kink"][fault.member] = True
            case "weights":
                where = lambda e: getattr(e.stacked, fault.leaf)
                models = eqx.tree_at(where, models, where(models).at[fault.member, ..., fault.row].set(fault.value))
            case "data":
                quality[fault.member, fault.step * BATCH + fault.row] = -1
    x, y = dataset()
    data = x, ee.Each(y), ee.Each(quality), np.repeat(np.arange(STEPS), BATCH)
    return ee.fit(
        models, loss, optimiser, data, steps=STEPS, batch_size=BATCH, shuffle=False, hyper=hyper, has_aux=True,
        plan=plan, progress=False, key=KEY,
    )  # fmt: skip


def part(tree, *index):
    """The value at `index` in every array of a tree, by path."""
    return {path: x[index] for path, x in numbers(tree).items()}


def same_bits(got, wanted):
    assert got, "there is nothing to compare"
    layout = lambda arrays: {path: (x.shape, x.dtype) for path, x in arrays.items()}
    return layout(got) == layout(wanted) and all(got[path].tobytes() == wanted[path].tobytes() for path in got)


OTHERS_STATE = "the others have the weights, optimiser's state and status that they have without the fault"
OTHERS_CURVES = "the others have the losses and weights at every step that they have without the fault"
OTHERS_STAY = "the others train to the end"
BEFORE = "nothing changes before the fault"
IN_TIME = "the member leaves in time"
CURVE = "its loss is finite before and NaN after"
PLACE = "what failed is named: the loss, or weights"
LAST_GOOD = "it keeps its last good weights"
FINITE = "its weights are finite unless they came otherwise"


def broken_promises(fault, left, clean, run):
    """The promises that a run breaks in which one member has a fault and should leave at step `left`, -1 for never.

    The auxiliary outputs are the weights before each step.
    """
    one, others, stays = fault.member, np.delete(np.arange(MEMBERS), fault.member), left < 0
    moving, clean_moving = run.train_state.moving, clean.train_state.moving
    curves, clean_curves = ((r.history.loss, r.history.aux) for r in (run, clean))
    losses, place, weights = run.history.loss[one], int(moving.fault[one]), part(moving.params, one)
    before = slice(0, fault.step)
    kept = {
        OTHERS_STATE: same_bits(part(moving, others), part(clean_moving, others)),
        OTHERS_CURVES: same_bits(part(curves, others), part(clean_curves, others)),
        OTHERS_STAY: (run.status[others] == Status.OK).all() and (run.stopped_at[others] == -1).all(),
        BEFORE: same_bits(part(curves, one, before), part(clean_curves, one, before)),
        IN_TIME: (run.stopped_at[one], run.status[one]) == (left, Status.OK if stays else Status.DIVERGED),
        CURVE: np.isfinite(losses if stays else losses[:left]).all() and (stays or np.isnan(losses[left + 1 :]).all()),
        PLACE: place == -1 if stays else (place > 0 if np.isfinite(losses[left]) else place == 0),
        LAST_GOOD: stays or same_bits(weights, part(run.history.aux, one, left)),
        FINITE: all(np.isfinite(x).all() for x in weights.values()) != (fault.kind == "weights"),
    }
    return [promise for promise in kept if not kept[promise]]


ALWAYS = range(STEPS)

# At which steps a gradient of NaN leaves the weights finite, as it does in training alone, and why.
SWALLOWED = {
    "apply_if_finite": ALWAYS,  # no update of three times is lost
    "conditionally_mask": range(1, STEPS, 2),  # every other update is zero
    "multi steps": ALWAYS,  # `skip_large_updates` skips what is not small
    "set_to_zero": ALWAYS,
    "zero_nans": ALWAYS,
}

# Steps until a gradient of NaN reaches the weights: optax's rprop applies each update one step later.
LATER = {"rprop": 1, "scale_by_rprop": 1}


def leaves_at(name, fault):
    """The step at which the member leaves, -1 for never."""
    if fault.kind != "gradient":
        return fault.step
    step = fault.step + LATER.get(name, 0)
    return -1 if fault.step in SWALLOWED.get(name, ()) or step >= STEPS else step


def wrong(name, plan):
    """All failures of an optimiser under a plan, one line per fault."""
    clean = fitted(optimiser(name), PLANS[plan])
    lines = [] if (clean.status == Status.OK).all() else ["the run without a fault has one"]
    for kind in KINDS:
        fault = drawn(kind, name, plan)
        run = fitted(optimiser(name), PLANS[plan], fault)
        if broken := broken_promises(fault, leaves_at(name, fault), clean, run):
            lines.append(f"{fault}, left {run.stopped_at}: not kept: {'; '.join(broken)}")
    return lines


# One under all plans, and reductions of every sort under one of the plans each.
ALL_PLANS = "lamb"
TELLING = {
    ("clip_by_global_norm", "vmap"), ("apply_if_finite", "vmap"), ("contrib.muon", "vmap"),
    ("conditionally_mask", "chunked"), ("contrib.prodigy", "chunked"),
    ("normalize_by_update_norm", "sequential"), ("polyak_sgd", "sequential"), ("adam", "unrolled"),
}  # fmt: skip


COMBINATIONS = [(name, plan) for name in TRAINED for plan in PLANS]


def _marks(name, plan):
    """Slow runs take every twelfth name under one plan, the plans in turn; all together take most of an hour."""
    if name == ALL_PLANS or (name, plan) in TELLING:
        return []
    place, rest = divmod(list(TRAINED).index(name), 12)
    in_turn = rest == 0 and plan == list(PLANS)[place % len(PLANS)]
    return pytest.mark.slow if in_turn else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param(name, plan, marks=_marks(name, plan)) for name, plan in COMBINATIONS]
)
def test_a_fault_stays_with_its_member(name, plan):
    lines = wrong(name, plan)
    if plan == list(PLANS)[-1] and name != ALL_PLANS:
        jax.clear_caches()  # hundreds of programs would take gigabytes
    assert not lines, "\n".join(lines)


def test_every_public_name_is_in_the_census():
    """`test_every_public_name_can_be_made` finds the names that are new."""
    assert len(COMBINATIONS) == len(PLANS) * len(TRAINED) > 480
    assert {name for name, _ in COMBINATIONS} | set(NOT_TRAINED) == set(PUBLIC)
    of_others = {ee.plan.AbstractPlan, ee.plan.Cores}  # they run the others
    public_plans = {plan for plan in vars(ee.plan).values() if isinstance(plan, type)} - of_others
    assert {type(plan) for plan in PLANS.values()} == public_plans
    assert TELLING <= set(COMBINATIONS)
    assert set(SWALLOWED) | set(LATER) <= set(TRAINED)


def test_faults_occur_in_every_member_and_at_every_step():
    faults = [drawn(kind, name, plan) for kind in KINDS for name, plan in COMBINATIONS]
    assert {fault.member for fault in faults} == set(range(MEMBERS))
    assert {fault.step for fault in faults if fault.kind == "gradient"} == set(range(STEPS))
    assert {(fault.leaf, np.isnan(fault.value)) for fault in faults if fault.kind == "weights"} == {
        (leaf, is_nan) for leaf in ("weight", "bias") for is_nan in (True, False)
    }


@pytest.mark.parametrize("plan", PLANS)
def test_weights_that_break_between_two_fits(plan):
    trained = fitted(optimiser(ALL_PLANS), PLANS[plan]).ensemble
    clean = fitted(optimiser(ALL_PLANS), PLANS[plan], models=trained)
    fault = drawn("weights", "between", plan)
    run = fitted(optimiser(ALL_PLANS), PLANS[plan], fault, models=trained)
    assert not broken_promises(fault, 0, clean, run)


class Coupled(ee.plan.AbstractPlan):
    """Runs members so that they can see each other, which no plan of the library allows."""

    def run(self, fn, arrays):
        return jax.vmap(fn, axis_name="members")(arrays)


@functools.cache
def _clip_of_all_members():
    """What `optax.clip_by_global_norm` is on stacked parameters: one norm for all."""

    def update(updates, state, params=None):
        norm = jnp.sqrt(jax.lax.psum(optax.tree.norm(updates, squared=True), "members"))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), updates), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(1e-2))


@pytest.mark.parametrize("kind", ["gradient", "weights", "data"])
def test_a_norm_of_all_members_would_be_noticed(kind):
    optimiser, plan = _clip_of_all_members(), Coupled()
    clean, fault = fitted(optimiser, plan), Fault(kind, member=1, step=0 if kind == "weights" else 3)
    assert (clean.status == Status.OK).all()
    broken = broken_promises(fault, fault.step, clean, fitted(optimiser, plan, fault))
    assert OTHERS_STATE in broken
    assert OTHERS_STAY in broken


def _judges_nobody(before, after, outputs, step, num_steps, *, finite_loss):
    return after, outputs, jnp.bool_(False)


def _judges_all_for_one(before, after, outputs, step, num_steps, **options):
    moving, outputs, again = _chunk_judged(before, after, outputs, step, num_steps, **options)
    someone = jnp.any(moving.status != 0)
    return eqx.tree_at(lambda m: m.status, moving, jnp.where(someone, jnp.int8(2), moving.status)), outputs, again


_chunk_judged = _chunk.revert_diverged


@pytest.mark.parametrize(
    ("judged", "noticed", "kept"),
    [(_judges_nobody, {IN_TIME, FINITE}, OTHERS_STATE), (_judges_all_for_one, {OTHERS_STATE, OTHERS_STAY}, FINITE)],
    ids=["nobody", "all"],
)
def test_wrong_judgement_would_be_noticed(judged, noticed, kept, monkeypatch):
    monkeypatch.setattr(_chunk, "revert_diverged", judged)
    optimiser, fault = optax.sgd(1e-2), Fault("data", member=2, step=3)  # an object of its own is compiled anew
    clean, run = fitted(optimiser, PLANS["vmap"]), fitted(optimiser, PLANS["vmap"], fault)
    broken = set(broken_promises(fault, fault.step, clean, run))
    assert noticed <= broken
    assert kept not in broken


def test_one_bit_would_be_noticed():
    clean, fault = fitted(optimiser(ALL_PLANS), PLANS["vmap"]), Fault("loss", member=0, step=2)
    run = fitted(optimiser(ALL_PLANS), PLANS["vmap"], fault)
    assert not broken_promises(fault, fault.step, clean, run)
    first = lambda run: jax.tree.leaves(run.train_state.opt_state)[-1]
    one_bit = lambda x: jnp.asarray(np.asarray(x)).at[1, -1].set(jnp.nextafter(x[1, -1], jnp.inf))
    assert broken_promises(fault, fault.step, clean, eqx.tree_at(first, run, replace_fn=one_bit)) == [OTHERS_STATE]
    assert IN_TIME in broken_promises(fault, fault.step + 1, clean, run)
