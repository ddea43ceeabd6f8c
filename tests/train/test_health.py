"""Members that fail within a chunk, whose steps are not checked one by one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import Alone, assert_close, assert_same, assert_same_where_optimised, in_order, step_key

MEMBERS, ROWS, BATCH, STEPS = 6, 66, 4, 50  # epochs of sixteen full batches and one of two rows
BUILD_KEY, KEY = jax.random.key(0), jax.random.key(1)


class Model(eqx.Module):
    linear: eqx.nn.Linear
    unseen: jax.Array

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 1, key=key)
        self.unseen = jnp.zeros(2)

    def __call__(self, x):
        return self.linear(x)


def dataset():
    x = jax.random.normal(jax.random.key(2), (ROWS, 3))
    return x, jnp.sin(x[:, :1])


def loss(model, batch, key):
    """Dropout of inputs, so that the member's key is seen."""
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fails_at(where, step):
    """An update that is not finite at one step: of weights that the loss sees, or of others."""

    def init(params):
        return jnp.zeros((), jnp.int32)

    def update(updates, count, params=None):
        broken = jnp.where(count == step, jnp.inf, 0.0)
        return eqx.tree_at(where, updates, replace_fn=lambda x: x + broken), count + 1

    return optax.GradientTransformation(init, update)


def seen(model):
    return model.linear.bias


def unseen(model):
    return model.unseen


SGD = optax.sgd(0.05, momentum=0.9)
ALONE = Alone(loss, SGD)
ENSEMBLE = ee.build(Model, MEMBERS, key=BUILD_KEY)


@functools.cache
def faulty_optimiser(where):
    """The same object for the same `where`, so that one compiled program serves all faults."""
    return lambda h: optax.chain(SGD, fails_at(where, h["fault"]))


def fitted(steps_of_fault, where, plan=None, **options):
    hyper = {"fault": np.array(steps_of_fault, np.int32)}
    options = {"batch_size": BATCH, "shuffle": False, "steps": STEPS, "plan": plan, "key": KEY} | options
    return ee.fit(ENSEMBLE, loss, faulty_optimiser(where), dataset(), hyper=hyper, **options)


FAULTS = {
    "one": [-1, -1, 9, -1, -1, -1],
    "the first step": [-1, 0, -1, -1, -1, -1],
    "the last step": [-1, -1, -1, -1, STEPS - 1, -1],
    "the last batch of an epoch": [-1, -1, 16, -1, 33, -1],
    "neighbouring steps": [20, 21, 22, 23, -1, -1],
    "one step": [7, -1, 7, -1, 7, -1],
    "nearly all": [3, 11, 16, -1, 17, 40],
    "all": [3, 11, 16, 30, 17, 40],
}


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
@pytest.mark.parametrize("where", [seen, unseen])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_every_fault_is_found_at_its_step(faults, where):
    run = fitted(faults, where)
    assert run.stopped_at.tolist() == faults
    assert run.status.tolist() == [Status.OK if fault < 0 else Status.DIVERGED for fault in faults]
    healthy = fitted([-1] * MEMBERS, where)
    batches = in_order(dataset(), BATCH, STEPS)
    for i, fault in enumerate(faults):
        if fault < 0:
            assert_same(run.ensemble[i], healthy.ensemble[i])  # bit for bit, whatever befell the others
            np.testing.assert_array_equal(run.history.loss[i], healthy.history.loss[i])
            continue
        length = run.history.loss.shape[1]
        np.testing.assert_array_equal(run.history.loss[i, : fault + 1], healthy.history.loss[i, : fault + 1])
        assert np.isnan(run.history.loss[i, fault + 1 :]).all()
        assert length == (STEPS if -1 in faults else max(faults) + 1)
        keys = [step_key(KEY, i, step) for step in range(fault)]
        expected, _, _ = ALONE(ENSEMBLE[i], batches[:fault], keys)
        assert_close(run.ensemble[i], expected, 1e-5)


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
@pytest.mark.parametrize("plan", [ee.plan.Chunked(4), ee.plan.Sequential(), ee.plan.Unrolled()], ids=repr)
def test_faults_under_other_plans(plan):
    faults = FAULTS["nearly all"]
    run, healthy = fitted(faults, unseen, plan), fitted([-1] * MEMBERS, unseen, plan)
    assert run.stopped_at.tolist() == faults
    assert_same_where_optimised(run.ensemble[3], healthy.ensemble[3])


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
def test_the_users_own_loop_finds_the_same_faults():
    faults = FAULTS["nearly all"]
    run = fitted(faults, unseen)
    optimiser = faulty_optimiser(unseen)
    state = ee.train.init(ENSEMBLE, optimiser, hyper={"fault": np.array(faults, np.int32)}, key=KEY)
    step = ee.train.make_step(loss, optimiser)
    for batch in in_order(dataset(), BATCH, STEPS):
        state, metrics = step(state, batch)
    np.testing.assert_array_equal(state.moving.stopped_at, run.stopped_at)
    np.testing.assert_array_equal(metrics.status, run.train_state.status)
    assert_close(state.ensemble, run.ensemble, 1e-5)


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
def test_validation_with_faults():
    """Pieces that are run again validate once, and members that failed have their best weights from before."""
    options = {"steps": None, "epochs": 3, "validation": dataset()}
    faults = [-1, 9, 20, 33, -1, 50]
    run, healthy = fitted(faults, seen, **options), fitted([-1] * MEMBERS, seen, **options)
    assert run.history.validation_step.tolist() == [17, 34, 51]
    assert run.best_step[1] == -1
    assert run.best_step[2] == 17
    for i, fault in enumerate(faults):
        judged = 3 if fault < 0 else fault // 17
        np.testing.assert_array_equal(run.history.validation[i, :judged], healthy.history.validation[i, :judged])
        assert np.isnan(run.history.validation[i, judged:]).all()


def test_an_optimiser_that_handles_bad_gradients_continues():
    """A gradient that is not finite is no fault where the weights stay finite: training alone continues too."""

    def kinked(model, batch, key):
        x, y = batch
        # The gradient of sqrt at 0 is infinite, that of abs is not; the value is finite.
        return jnp.mean((jax.vmap(model)(x) - y) ** 2) + jnp.sum(jnp.sqrt(model.unseen**2))

    optimiser = optax.apply_if_finite(optax.sgd(0.05), 100)
    ensemble = ee.build(Model, 2, key=BUILD_KEY)
    ensemble = eqx.tree_at(lambda e: e.stacked.unseen, ensemble, jnp.array([[0.0, 0.0], [1.0, 1.0]]))
    run = ee.fit(ensemble, kinked, optimiser, dataset(), batch_size=BATCH, shuffle=False, steps=20, key=KEY)
    assert run.status.tolist() == [Status.OK, Status.OK]
    assert_same(run.ensemble[0], ensemble[0])
    alone = Alone(kinked, optimiser)
    keys = [step_key(KEY, 1, step) for step in range(20)]
    expected, _, _ = alone(ensemble[1], in_order(dataset(), BATCH, 20), keys)
    assert_close(run.ensemble[1], expected, 1e-5)


def test_a_failure_that_must_not_be():
    """The error names the members that failed and the steps, and holds the run so far."""
    with pytest.raises(ee.train.DivergedError, match=r"1 member\(s\) diverged .*: 2 at step 9 \(`.*`\)\.") as caught:
        fitted(FAULTS["one"], unseen, on_diverge="raise", steps=10**6)
    run = caught.value.run
    assert run.status.tolist() == [Status.OK, Status.OK, Status.DIVERGED, Status.OK, Status.OK, Status.OK]
    assert 9 < run.history.loss.shape[1] < 10**4
    assert run.healthy.ids.tolist() == [0, 1, 3, 4, 5]
    assert_same(run.healthy, run.ensemble[[0, 1, 3, 4, 5]])
    healthy = fitted([-1] * MEMBERS, unseen, on_diverge="raise")
    assert healthy.healthy is healthy.ensemble
