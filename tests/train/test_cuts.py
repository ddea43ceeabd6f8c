"""A run that is interrupted anywhere and resumed equals the uninterrupted run: no step more, none less, none twice."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import assert_close, assert_same, grouped

KEY = jax.random.key(0)
MEMBERS = 3
EPOCHS = 3
ADAM = optax.adam(1e-2)
PLANS = [
    {"plan": plan(*size), "scan": scan}
    for plan, size in ((ee.plan.Vmap, ()), (ee.plan.Chunked, (2,)), (ee.plan.Sequential, ()))
    for scan in (None, True, False)
]


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def noisy_loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)  # so that a stream that started again would be seen
    return loss(model, (jnp.where(keep, x, 0.0), y), key)


def data(rows):
    x = jax.random.normal(KEY, (rows, 2))
    return x, jnp.sin(x[:, 0])


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), MEMBERS, key=KEY)


class Resumable:
    """Batches that report their position by their own live state; the last is smaller where `size` does not divide."""

    def __init__(self, data, size):
        self._data, self._size, self._state = data, size, {"row": 0}

    def __iter__(self):
        return Resumable(self._data, self._size)

    def __next__(self):
        start = self._state["row"]
        self._state["row"] += self._size
        if start >= len(self._data[0]):
            raise StopIteration
        return jax.tree.map(lambda x: x[start : start + self._size], self._data)

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


def a_case(seed):
    """A random call of `fit`: how often it is cut, over what."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 80))
    batch_size = int(rng.integers(max(1, rows // 6), rows + 1))
    options = PLANS[rng.integers(len(PLANS))] | {"validation": data(8) if rng.random() < 0.5 else None}
    if rng.random() < 0.25:
        source = Resumable(data(rows), batch_size)
        del options["scan"]
    else:
        source = data(rows)
        options |= {"batch_size": batch_size, "shuffle": (True, "shared", False)[rng.integers(3)]}
    return -(-rows // batch_size), lambda begun, **more: ee.fit(
        begun, noisy_loss, ADAM, source, progress=False, key=KEY, **grouped(options | more)
    )


def assert_same_training(run, whole):
    np.testing.assert_array_equal(run.train_state.opt_state[0].count, int(whole.train_state.step))
    assert_same(run.train_state, whole.train_state)
    assert_same(run.history.loss, whole.history.loss)


def assert_same_epochs(run, whole):
    """A cut adds a validation. What a whole run validates is there too, and members stop when they would have."""
    if whole.history.validation is None:
        return
    kept = np.isin(run.history.validation_step, whole.history.validation_step)
    assert_same(run.history.validation[:, kept], whole.history.validation)
    assert_same((run.selection.bar, run.selection.waited), (whole.selection.bar, whole.selection.waited))


@pytest.mark.parametrize("seed", range(4))
def test_cut_at_every_step(ensemble, seed):
    per_epoch, fit = a_case(seed)
    whole = fit(ensemble, steps=EPOCHS * per_epoch)
    run = ensemble
    for _ in range(EPOCHS * per_epoch):
        run = fit(run, steps=1)
    assert_same_training(run, whole)
    assert_same_epochs(run, whole)
    if run.best_score is not None:
        assert_same(run.best_score, np.nanmin(run.history.validation, axis=1))


@pytest.mark.parametrize("seed", [0, 2])
def test_resumed_at_every_step(ensemble, tmp_path, seed):
    """The same call with one more step each time, from the checkpoint of the one before."""
    per_epoch, fit = a_case(seed)
    whole = fit(ensemble, steps=2 * per_epoch)
    for steps in range(1, 2 * per_epoch + 1):
        run = fit(ensemble, steps=steps, checkpoint=tmp_path / "run")
    assert_same_training(run, whole)


def test_resumed_after_an_epoch_of_an_iterator(ensemble, tmp_path):
    """The end of the epoch is validated once, and counts once for patience."""
    score = lambda model, batch, key: jnp.float32(1)
    options = {
        "validation": ee.train.Validation(data(8), score=score, mode="min"),
        "patience": 3,
        "progress": False,
        "key": KEY,
    }
    fit = lambda **more: ee.fit(ensemble, loss, ADAM, Resumable(data(20), 8), **grouped(options | more))
    for epochs in (1, 2, 6):
        run = fit(epochs=epochs, checkpoint=tmp_path / "run")
    assert run.stopped_at.tolist() == [12] * MEMBERS
    assert run.history.validation_step.tolist() == [3, 6, 9, 12]


@pytest.mark.parametrize(("rows", "scan"), [(33, None), (40, False)])
def test_is_what_optax_alone_does(ensemble, rows, scan):
    """Every row once an epoch, at the default batch size, in a plain loop over single members."""
    run = ensemble
    for steps in (1, 1, 2):
        run = ee.fit(
            run,
            loss,
            ADAM,
            data(rows),
            steps=steps,
            shuffle=False,
            plan=ee.plan.Vmap(scan=scan),
            progress=False,
            key=KEY,
        )

    @eqx.filter_jit
    @jax.numpy_dtype_promotion("standard")  # optax raises a Python float to the count's power
    def step(model, state, x, y):
        updates, state = ADAM.update(eqx.filter_grad(loss)(model, (x, y), None), state)
        return eqx.apply_updates(model, updates), state

    x, y = data(rows)
    members = []
    for model in ensemble.unstack():
        state = ADAM.init(eqx.filter(model, eqx.is_array))
        for start in (0, 32, 0, 32):
            model, state = step(model, state, x[start : start + 32], y[start : start + 32])
        members.append(model)
    assert_close(run.ensemble.stacked, ee.stack(members).stacked, 1e-5)  # as far as Vmap promises


def test_patience_and_target_count_whole_epochs(ensemble):
    """Where a run is cut makes no member stop earlier, and none later."""
    target = jnp.array([-1.0, -1.0, 0.4])
    options = {
        "validation": ee.train.Validation(data(8), min_delta=0.01),
        "patience": 2,
        "stop": ee.train.Stopping(target=target),
        "batch_size": 8,
    }
    fit = lambda begun, steps: ee.fit(
        begun, loss, ADAM, data(20), steps=steps, progress=False, key=KEY, **grouped(options)
    )
    whole, run = fit(ensemble, 60), fit(ensemble, 4)
    assert len(set(whole.stopped_at.tolist())) > 1
    while run.train_state.step < 60 and (run.status == Status.OK).any():
        run = fit(run, 4)  # a step more than an epoch
    assert run.stopped_at.tolist() == whole.stopped_at.tolist()
    assert run.status.tolist() == whole.status.tolist()
    assert_same(run.train_state.params, whole.train_state.params)
    assert_same_epochs(run, whole)


@pytest.mark.slow
def test_halving_and_populations_make_the_steps_asked_for(ensemble):
    hyper = {"lr": jnp.array([1e-2, 1e-3, 1e-4])}
    optimiser = lambda hyper: optax.adam(hyper["lr"])
    options = {"data": data(40), "hyper": hyper, "validation": data(8), "progress": False, "key": KEY}
    halved = ee.methods.successive_halving(ensemble, loss, optimiser, steps=1, factor=2, rungs=3, **grouped(options))
    assert halved.train_state.opt_state[0].count.max() == 4
    found = ee.methods.population_based_training(ensemble, loss, optimiser, steps=1, rounds=4, **grouped(options))
    np.testing.assert_array_equal(found.run.train_state.opt_state[0].count, 4)
