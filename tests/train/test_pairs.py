"""Random combinations of options of `fit`: most faults are in combinations of two options.

Each member is compared with a plain loop over it alone, of Equinox and optax; and the run with a twin that is to be the
same: under another plan, cut in two, with fewer members, on a mesh, or saved and resumed.
"""

import functools
import types
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status
from eqx_ensemble.train.host import _active
from eqx_ensemble.train.host import _loop as _pacing

from ..factories import distance, grouped, relaxed, step_key
from .plain_orders import plain_permutation

KEY = jax.random.key(0)
MEMBERS, ROWS = 3, 11
RATES, SCALES = [0.1, 0.5, 0.3], [0.7, 1.3, 1.0]
OPTIMISERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2, eps=1e-3), "steps": optax.sgd(0.1, momentum=0.9)}
PLANS = [ee.plan.Vmap(), ee.plan.Chunked(2), ee.plan.Sequential(), ee.plan.Unrolled()]
PLANS += [ee.plan.Cores(block=2, count=2), ee.plan.Cores(ee.plan.Sequential(), block=2, count=3)]
TWINS = ("plan", "cut", "subset", "mesh", "checkpoint")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*diverged:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*do not divide:UserWarning"),
]
# Members side by side may round otherwise; a dozen steps of these optimisers do not enlarge that.
RTOL = 1e-4


class Net(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    scale: float

    def __init__(self, key, rate=0.2, scale=1.0):
        k1, k2 = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(2, 4, key=k1), eqx.nn.Linear(4, "scalar", key=k2)
        self.dropout, self.scale = eqx.nn.Dropout(rate), scale

    def __call__(self, x, key):
        return self.second(self.dropout(jnp.tanh(self.first(x) * self.scale), key=key))


def loss(model, batch, key):
    x, y, *weights = batch
    errors = (jax.vmap(model)(x, jax.random.split(key, len(x))) - y) ** 2
    return jnp.sum(weights[0] * errors) / len(x) if weights else jnp.mean(errors)


def negative(model, batch, key):
    return -loss(model, batch, key)


def of_hyper(hyper):
    return optax.sgd(hyper["lr"])


def matrices(x):
    return eqx.is_inexact_array(x) and x.ndim == 2


def drawn(seed):
    """A call of `fit`: its options, and what the plain loop needs."""
    rng = np.random.default_rng(seed)
    maybe, pick = lambda share: bool(rng.random() < share), lambda *values: values[rng.integers(len(values))]
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    case = types.SimpleNamespace(seed=seed, zip=maybe(0.4), lost=int(rng.integers(MEMBERS)) if maybe(0.2) else None)
    case.rows = rng.integers(0, ROWS, (MEMBERS, 8)) if maybe(0.3) else None
    case.shuffle, case.batch_size = pick(True, "shared", False), pick(3, 4, 8)
    case.per_epoch = -(-(ROWS if case.rows is None else 8) // case.batch_size)
    case.steps = int(rng.integers(case.per_epoch, 4 * case.per_epoch + 1))
    own = maybe(0.3)
    x = array(*[MEMBERS] * own, ROWS, 2)
    parts = (x, jnp.sin(x[..., 0]) + x[..., 1])
    case.data = tuple(ee.Each(part) for part in parts) if own else parts
    x = array(5, 2)
    case.validation = (x, jnp.sin(x[:, 0]) + x[:, 1]) if maybe(0.7) else None
    if maybe(0.4):
        case.data += (ee.Each(jnp.asarray(rng.integers(0, 3, (MEMBERS, ROWS)), jnp.float32)),)
        case.validation = None if case.validation is None else (*case.validation, jnp.ones(5))
    judged = case.validation is not None
    case.mode = pick("min", "max") if judged else "min"
    case.twin = TWINS[seed % len(TWINS)]
    patient = judged and case.twin not in ("cut", "checkpoint")  # parts of an epoch have no room for patience
    case.patience, case.min_delta = pick(None, 1, 2) if patient else None, pick(0.0, 0.02) if judged else 0.0
    case.target = rng.uniform(0.0, 0.9, MEMBERS) * (1 if case.mode == "min" else -1) if judged and maybe(0.4) else None
    case.max_steps = rng.integers(1, 3 * case.per_epoch + 2, MEMBERS) if maybe(0.4) else None
    case.hyper = {"lr": jnp.asarray(rng.uniform(0.01, 0.2, MEMBERS), jnp.float32)} if maybe(0.4) else None
    case.optimiser = of_hyper if case.hyper else OPTIMISERS[pick(*OPTIMISERS)]
    case.trainable = pick(eqx.is_inexact_array, matrices)
    drawn = rng.choice(len(PLANS), 2, replace=False)
    case.plans = [{"plan": PLANS[i], "scan": pick(None, True, False)} for i in drawn]
    case.chosen = rng.permutation(MEMBERS)[:2]
    case.cut = int(rng.integers(1, case.steps)) if case.steps > 1 else 1
    return case


@functools.cache
def built(*, numbers):
    if numbers:
        return ee.build(Net, zip={"rate": RATES, "scale": SCALES}, key=KEY)
    return ee.build(Net, MEMBERS, key=KEY)


def ensemble_of(case):
    ensemble = built(numbers=case.zip)
    if case.lost is None:
        return ensemble
    weight = lambda ensemble: ensemble.stacked.first.weight
    return eqx.tree_at(weight, ensemble, weight(ensemble).at[case.lost].set(jnp.nan))


def fitted(case, begun=None, *, members=slice(None), steps=None, plan=None, **more):
    own = lambda tree: jax.tree.map(lambda x: x[members], tree)
    given = {"target": case.target, "max_steps": case.max_steps, "rows": case.rows}
    options = {name: value[members] for name, value in given.items() if value is not None}
    if case.validation is not None:
        options |= {"validation": case.validation, "mode": case.mode, "min_delta": case.min_delta}
        options |= {"patience": case.patience, "score": negative if case.mode == "max" else None}
    if begun is None:
        begun = ensemble_of(case)
        begun = begun if isinstance(members, slice) else begun[members]
        options |= {"hyper": own(case.hyper), "trainable": case.trainable}
    data = tuple(ee.Each(part.value[members]) if isinstance(part, ee.Each) else part for part in case.data)
    return ee.fit(
        begun, loss, case.optimiser, data, steps=steps or case.steps, batch_size=case.batch_size, shuffle=case.shuffle,
        progress=False, key=KEY, **grouped((plan or case.plans[0]) | options | more),
    )  # fmt: skip


# The plain loop


def order_of(case, member, epoch):
    """The rows of one epoch as one member sees them, by the network as documented, from the key and the epoch."""
    count = ROWS if case.rows is None else case.rows.shape[1]
    if not case.shuffle:
        places = np.arange(count)
    else:
        purpose, stream = ("shared rows", 0) if case.shuffle == "shared" else ("rows", member)
        key = jax.random.fold_in(jax.random.fold_in(KEY, zlib.crc32(purpose.encode())), stream)
        places = plain_permutation(np.asarray(jax.random.key_data(key)), epoch, count)
    return places if case.rows is None else case.rows[member][places]


@eqx.filter_jit
def plain_step(params, frozen, opt_state, batch, key, hyper, optimiser):
    value = lambda params: loss(eqx.combine(params, frozen), batch, key)
    now, gradient = jax.value_and_grad(value)(params)
    with relaxed():
        optimiser = optimiser if hyper is None else optimiser(hyper)
        updates, opt_state = optimiser.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, now


@eqx.filter_jit
def plain_score(model, batch, key):
    return loss(eqx.nn.inference_mode(model), batch, key)


class Plain:
    """One member in a plain loop: weights, when and why it left, and its best score."""

    def __init__(self, case, member):
        numbers = (RATES[member], SCALES[member]) if case.zip else ()
        model = Net(ee.member_keys(KEY, MEMBERS)[member], *numbers)
        if case.lost == member:
            model = eqx.tree_at(lambda model: model.first.weight, model, model.first.weight * jnp.nan)
        self.case, self.member = case, member
        self.params, self.frozen = eqx.partition(model, case.trainable)
        self.best, self.score, self.bar, self.best_step, self.waited = self.params, np.inf, np.inf, -1, 0
        self.status, self.stopped_at, self.losses, self.scored = Status.OK, -1, [], -1

    def train(self):
        case, one = self.case, lambda part: part.value[self.member] if isinstance(part, ee.Each) else part
        hyper = None if case.hyper is None else jax.tree.map(lambda x: x[self.member], case.hyper)
        with relaxed():
            optimiser = case.optimiser if hyper is None else case.optimiser(hyper)
            opt_state = optimiser.init(self.params)
        for step in range(case.steps):
            epoch, place = divmod(step, case.per_epoch)
            rows = order_of(case, self.member, epoch)[place * case.batch_size :][: case.batch_size]
            batch, key = tuple(one(part)[rows] for part in case.data), step_key(KEY, self.member, step)
            params, opt_state, value = plain_step(
                self.params, self.frozen, opt_state, batch, key, hyper, case.optimiser
            )  # fmt: skip
            self.losses.append(float(value))
            if not np.isfinite(self.losses[-1]):
                return self.leave(Status.DIVERGED, step)
            self.params = params
            if case.max_steps is not None and step + 1 >= case.max_steps[self.member]:
                self.judge(step + 1, ends_epoch=False)
                return self.leave(Status.STOPPED, step + 1)
            if (step + 1) % case.per_epoch == 0:
                self.judge(step + 1, ends_epoch=True)
                if self.status != Status.OK:
                    return self
        if self.scored != case.steps:
            self.judge(case.steps, ends_epoch=False)
        return self

    def leave(self, status, step):
        self.status, self.stopped_at = status, step
        return self

    def judge(self, step, *, ends_epoch):
        """A validation in units of which less is better; patience and target count at the end of an epoch."""
        case = self.case
        if case.validation is None:
            return
        model, key = eqx.combine(self.params, self.frozen), step_key(KEY, self.member, step)
        score, self.scored = float(plain_score(model, case.validation, key)), step
        if score < self.score - case.min_delta:
            self.best, self.score, self.best_step = self.params, score, step
        if ends_epoch:
            self.bar, self.waited = (score, 0) if score < self.bar - case.min_delta else (self.bar, self.waited + 1)
            target = -np.inf if case.target is None else abs(case.target[self.member])
            if score <= target or self.waited == case.patience:
                self.leave(Status.STOPPED, step)


def check_alone(case, run):
    sign = 1 if case.mode == "min" else -1
    for member in range(MEMBERS):
        alone = Plain(case, member).train()
        assert (run.status[member], run.stopped_at[member]) == (alone.status, alone.stopped_at)
        losses = run.history.loss[member]
        np.testing.assert_allclose(losses[: len(alone.losses)], alone.losses, rtol=RTOL)
        assert np.isnan(losses[len(alone.losses) :]).all()
        if member == case.lost:
            continue
        own = lambda tree, member=member: jax.tree.map(lambda x: x[member], tree)
        assert distance(own(run.train_state.params), alone.params) < RTOL
        if case.validation is not None:
            assert run.best_step[member] == alone.best_step
            np.testing.assert_allclose(sign * run.best_score[member], alone.score, rtol=RTOL)
            assert distance(own(run.selection.params), alone.best) < RTOL


# The twin


def check_same(run, whole, *, members=slice(None), best=True):
    own = lambda tree: jax.tree.map(lambda x: x[members], tree)
    assert run.status.tolist() == own(whole.status).tolist()
    assert run.stopped_at.tolist() == own(whole.stopped_at).tolist()
    healthy = run.status != Status.DIVERGED
    fine = lambda tree: jax.tree.map(lambda x: x[healthy], tree)
    assert distance(fine(run.train_state.moving), fine(own(whole.train_state.moving))) < RTOL
    if best and whole.selection is not None:
        assert run.best_step.tolist() == own(whole.best_step).tolist()
        assert distance(fine(run.selection), fine(own(whole.selection))) < RTOL


def check_twin(case, whole, folder):
    best = case.validation is None or case.cut % case.per_epoch == 0  # a cut within an epoch is validated, too
    if case.twin == "plan":
        check_same(fitted(case, plan=case.plans[1]), whole)
    elif case.twin == "subset":
        check_same(fitted(case, members=case.chosen), whole, members=case.chosen)
    elif case.twin == "mesh":
        check_same(fitted(case, mesh=ee.make_mesh(members=2)), whole)
    elif case.twin == "checkpoint":
        path = folder / "run.eqx"
        fitted(case, steps=case.cut, checkpoint=ee.train.Checkpoint(path, every=2))
        check_same(fitted(case, plan=case.plans[1], checkpoint=path), whole, best=best)
    else:
        begun = fitted(case, steps=case.cut)
        if case.cut < case.steps and (begun.status == Status.OK).any():
            check_same(fitted(case, begun, steps=case.steps - case.cut), whole, best=best)


def _marks(seed):
    return [] if seed < len(TWINS) else pytest.mark.slow if seed < 2 * len(TWINS) else pytest.mark.exhaustive


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=_marks(seed)) for seed in range(70)])
def test_options_together(seed, tmp_path, monkeypatch):
    case = drawn(seed)
    whole = fitted(case)
    check_alone(case, whole)
    # The twin's chunks are short, and members leave its arrays as soon as they can.
    monkeypatch.setattr(_pacing, "_FIRST_STEPS", 2)
    monkeypatch.setattr(_active, "_FEWEST", 1)
    monkeypatch.setattr(_pacing.Pacing, "pays", lambda self, width, before, steps_left: width != before)
    check_twin(case, whole, tmp_path / "run")
