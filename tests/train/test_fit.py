import functools as ft
import os
import random
import signal
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._progress import progress_line
from eqx_ensemble.train import Status
from eqx_ensemble.train.host import _loop as _pacing
from eqx_ensemble.train.host._active import ActiveMembers

from ..factories import Alone, assert_close, assert_same, distance, in_order, step_key

ROWS, BATCH, MEMBERS = 22, 8, 3  # an epoch: two full batches and one of six rows
BUILD_KEY, KEY = jax.random.key(4), jax.random.key(5)
IDS = [7, 3, 12]


def make(key):
    return eqx.nn.Linear(3, 1, key=key)


def loss(model, batch, key):
    """Dropout of inputs, so that the member's key is seen."""
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


PLANS = [ee.plan.Vmap(), ee.plan.Chunked(2), ee.plan.Sequential(), ee.plan.Unrolled()]
SGD = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
ALONE = Alone(loss, SGD)


def dataset(rows=ROWS, seed=0):
    x = jax.random.normal(jax.random.key(seed), (rows, 3))
    return x, x @ jnp.array([[1.0], [-2.0], [0.5]]) + 0.3


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(make, ids=IDS, key=BUILD_KEY)


def keys_of(member, steps):
    return [step_key(KEY, member, step) for step in range(steps)]


def assert_alone(run, ensemble, batches_of, steps, alone=ALONE):
    """Every member of the run is the model trained alone on `batches_of(i)`."""
    for i, model in enumerate(ensemble.unstack()):
        expected, _, losses = alone(model, batches_of(i), keys_of(IDS[i], steps))
        assert distance(expected, model) > 1e-2
        assert_close(run.ensemble[i], expected, 1e-5)
        np.testing.assert_allclose(run.history.loss[i], losses, rtol=1e-5)


@pytest.mark.parametrize(("length", "steps"), [({"epochs": 3}, 9), ({"steps": 10}, 10), ({"steps": 11}, 11)])
def test_is_the_loop_over_the_same_rows(ensemble, length, steps):
    """The last batch of an epoch has six rows, and `steps` may end in the middle of one."""
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, shuffle=False, key=KEY, **length)
    assert run.history.loss.shape == (MEMBERS, steps)
    assert int(run.train_state.step) == steps
    assert_alone(run, ensemble, lambda i: in_order(dataset(), BATCH, steps), steps)
    assert run.history.validation is None
    assert run.history.aux is None
    assert run.status.tolist() == [Status.OK] * MEMBERS
    assert run.stopped_at.tolist() == [-1] * MEMBERS
    assert not run.interrupted


def test_own_loop_is_fit(ensemble):
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, shuffle=False, steps=9, key=KEY)
    state = ee.train.init(ensemble, SGD, key=KEY)
    step = ee.train.make_step(loss, SGD)
    losses = []
    for batch in in_order(dataset(), BATCH, 9):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    assert_close(state.moving, run.train_state.moving, 1e-6)
    np.testing.assert_allclose(np.stack(losses, axis=1), run.history.loss, rtol=1e-6)
    state, _ = ee.train.make_step(loss, SGD)(run.train_state, in_order(dataset(), BATCH, 1)[0])
    assert int(state.step) == 10


def test_ensemble_stays_usable(ensemble):
    x = dataset()[0][0]
    before, leaves = ensemble(x), jax.tree.leaves(ensemble)
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, shuffle=False, steps=9, key=KEY)
    np.testing.assert_array_equal(ensemble(x), before)
    arrays = [leaf for leaf in leaves + jax.tree.leaves(run) if isinstance(leaf, jax.Array)]
    assert not any(leaf.is_deleted() for leaf in arrays)
    assert run.ensemble(x).shape == (MEMBERS, 1)


def test_a_legacy_key_is_the_typed_key(ensemble):
    options = {"batch_size": BATCH, "steps": 9}
    typed = ee.fit(ensemble, loss, SGD, dataset(), key=jax.random.key(8), **options)
    legacy = ee.fit(ensemble, loss, SGD, dataset(), key=jax.random.PRNGKey(8), **options)
    other = ee.fit(ensemble, loss, SGD, dataset(), key=jax.random.key(9), **options)
    assert_same(typed.ensemble, legacy.ensemble)
    assert distance(typed.ensemble, other.ensemble) > 1e-3


def indexed_loss(model, batch, key):
    """Reports which rows it saw."""
    *batch, row = batch
    return loss(model, batch, key), row


def rows_seen(ensemble, **options):
    """The rows that each member saw `(members, epochs, rows)`, and the run; 24 rows are three full batches."""
    options = {"epochs": 3, "batch_size": BATCH, "key": KEY} | options
    run = ee.fit(ensemble, indexed_loss, SGD, (*dataset(24), jnp.arange(24)), has_aux=True, **options)
    return run.history.aux.reshape(len(ensemble), 3, -1), run


def assert_trained_on(rows, run, ensemble):
    x, y = dataset(24)
    batches_of = lambda i: [(x[chosen], y[chosen]) for chosen in rows[i].reshape(-1, BATCH)]
    assert_alone(run, ensemble, batches_of, rows[0].size // BATCH)


def test_each_member_has_an_order_of_its_own(ensemble):
    rows, run = rows_seen(ensemble)
    np.testing.assert_array_equal(np.sort(rows), np.broadcast_to(np.arange(24), rows.shape))
    assert len(np.unique(rows.reshape(-1, 24), axis=0)) == MEMBERS * 3
    assert_trained_on(rows, run, ensemble)
    reordered, _ = rows_seen(ensemble[[2, 0, 1]])
    np.testing.assert_array_equal(reordered, rows[np.array([2, 0, 1])])


def test_one_order_for_all(ensemble):
    rows, run = rows_seen(ensemble, shuffle="shared")
    np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
    np.testing.assert_array_equal(np.sort(rows), np.broadcast_to(np.arange(24), rows.shape))
    assert len(np.unique(rows[0], axis=0)) == 3
    assert_trained_on(rows, run, ensemble)
    given, run = rows_seen(ensemble, shuffle=False)
    np.testing.assert_array_equal(given, np.broadcast_to(np.arange(24), rows.shape))
    assert_trained_on(given, run, ensemble)


def test_rows_of_its_own(ensemble):
    """A bootstrap: indices with repetition; 16 of them are two batches."""
    bootstrap = np.random.default_rng(0).integers(0, 24, (MEMBERS, 16))
    rows, run = rows_seen(ensemble, rows=bootstrap, shuffle=False)
    np.testing.assert_array_equal(rows, np.broadcast_to(bootstrap[:, None], rows.shape))
    assert_trained_on(rows, run, ensemble)
    shuffled, _ = rows_seen(ensemble, rows=bootstrap)
    np.testing.assert_array_equal(np.sort(shuffled), np.sort(rows))
    assert (shuffled[:, 0] != shuffled[:, 1]).any(axis=1).all()
    assert (np.argsort(shuffled[0, 0], stable=True) != np.argsort(shuffled[1, 0], stable=True)).any()


def test_data_of_its_own(ensemble):
    x, y = dataset()
    xs = jnp.stack([x, 2 * x, x[::-1]])
    run = ee.fit(ensemble, loss, SGD, (ee.Each(xs), y), batch_size=BATCH, shuffle=False, epochs=2, key=KEY)
    assert_alone(run, ensemble, lambda i: in_order((xs[i], y), BATCH, 6), 6)


def test_hyper_parameters_of_its_own(ensemble):
    """In the optimiser and in the loss."""
    hyper = {"rate": np.array([0.01, 0.1, 0.03], np.float32), "decay": np.array([0.0, 0.1, 1.0], np.float32)}

    def decayed(model, batch, key, hyper):
        return loss(model, batch, key) + hyper["decay"] * jnp.sum(model.weight**2)

    def optimiser(h):
        return optax.chain(optax.clip_by_global_norm(10 * h["rate"]), optax.sgd(h["rate"], momentum=0.9))

    run = ee.fit(ensemble, decayed, optimiser, dataset(), batch_size=11, shuffle=False, steps=8, hyper=hyper, key=KEY)
    for i, model in enumerate(ensemble.unstack()):
        own = {name: float(values[i]) for name, values in hyper.items()}
        alone = Alone(lambda *args, own=own: decayed(*args, own), optimiser(own))
        expected, _, losses = alone(model, in_order(dataset(), 11, 8), keys_of(IDS[i], 8))
        assert_close(run.ensemble[i], expected, 1e-5)
    table = run.table()
    assert list(table) == ["member", "decay", "rate", "loss", "status", "stopped_at"]
    assert table["member"].tolist() == IDS
    np.testing.assert_array_equal(table["rate"], hyper["rate"])
    assert run.epoch == -(-len(dataset()[0]) // 11)
    np.testing.assert_allclose(table["loss"], run.history.loss[:, -run.epoch :].mean(axis=1), rtol=1e-6)


def test_auxiliary_outputs_of_scalars(ensemble):
    def with_aux(model, batch, key):
        value = loss(model, batch, key)
        return value, {"double": 2 * value, "weights": model.weight}

    run = ee.fit(ensemble, with_aux, SGD, dataset(), batch_size=BATCH, shuffle=False, steps=6, has_aux=True, key=KEY)
    np.testing.assert_array_equal(run.history.aux["double"], 2 * run.history.loss)
    assert run.history.aux["weights"].shape == (MEMBERS, 6, 1, 3)
    np.testing.assert_array_equal(run.history.aux["weights"][:, 0], ensemble.stacked.weight)


def patient_loop(model, member, epochs, patience, min_delta, validation, alone):
    """One model with its best weights and its patience, in Python."""
    best, best_score, best_step, waited, scores = model, np.inf, -1, 0, []
    opt_state = alone.init(model)
    params, frozen = eqx.partition(model, eqx.is_inexact_array)
    step = 0
    for _ in range(epochs):
        for batch in in_order(dataset(), BATCH, 3):
            params, opt_state, _, _ = alone.step(params, frozen, opt_state, None, batch, step_key(KEY, member, step))
            step += 1
        score = float(alone.value(params, frozen, None, validation, step_key(KEY, member, step))[0])
        scores.append(score)
        if score < best_score - min_delta:
            best, best_score, best_step, waited = eqx.combine(params, frozen), score, step, 0
        else:
            waited += 1
        if waited >= patience:
            return best, best_score, best_step, step, scores
    return best, best_score, best_step, -1, scores


@pytest.mark.parametrize("min_delta", [0.0, 0.1])
def test_patience_of_its_own(ensemble, min_delta):
    validation, epochs = dataset(10, seed=1), 12
    run = ee.fit(
        ensemble,
        loss,
        SGD,
        dataset(),
        batch_size=BATCH,
        shuffle=False,
        epochs=epochs,
        validation=ee.train.Validation(validation, min_delta=min_delta),
        patience=2,
        key=KEY,
    )
    assert run.history.validation_step.tolist() == list(range(3, run.history.loss.shape[1] + 1, 3))
    for i, model in enumerate(ensemble.unstack()):
        best, score, step, left, scores = patient_loop(model, IDS[i], epochs, 2, min_delta, validation, ALONE)
        assert_close(run.ensemble[i], best, 1e-5)
        assert run.best_step[i] == step
        assert run.stopped_at[i] == left
        assert run.status[i] == (Status.OK if left < 0 else Status.STOPPED)
        np.testing.assert_allclose(run.best_score[i], score, rtol=1e-5)
        np.testing.assert_allclose(run.history.validation[i, : len(scores)], scores, rtol=1e-5)
        assert np.isnan(run.history.validation[i, len(scores) :]).all()
        assert np.isnan(run.history.loss[i, 3 * len(scores) :]).all()
        assert np.isfinite(run.history.loss[i, : 3 * len(scores)]).all()
    assert (run.status == Status.STOPPED).any()
    if min_delta == 0.0:
        assert len(set(run.stopped_at.tolist())) > 1, "members that stop together show little"
    table = run.table()
    assert {"validation", "best_step"} <= set(table)
    assert np.isfinite(table["loss"]).all()


def test_score_in_inference_mode():
    """`score` replaces the loss in validation, without dropout, and lower is better."""

    def make(key):
        return eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Linear(3, 1, key=key)])

    def dropout_loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x, key=jax.random.split(key, len(x))) - y) ** 2)

    def score(model, batch, key):
        x, y = batch
        return jnp.max(jnp.abs(jax.vmap(lambda x: model(x))(x) - y))

    ensemble, validation = ee.build(make, 2, key=BUILD_KEY), dataset(10, seed=1)
    run = ee.fit(
        ensemble,
        dropout_loss,
        SGD,
        dataset(),
        batch_size=ROWS,
        epochs=4,
        validation=ee.train.Validation(validation, score=score, mode="min"),
        key=KEY,
    )
    found = [score(eqx.nn.inference_mode(member), validation, None) for member in run.ensemble]
    np.testing.assert_allclose(run.best_score, found, rtol=1e-6)
    np.testing.assert_allclose(run.best_score, run.history.validation.min(axis=1), rtol=1e-6)
    assert not run.ensemble.stacked.layers[0].inference


class Counting(eqx.Module):
    """Counts its steps in its state."""

    linear: eqx.nn.Linear
    index: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 1, key=key)
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        return self.linear(x), state.set(self.index, state.get(self.index) + 1)


def test_state_goes_with_the_best_weights():
    def counting_loss(model, state, batch, key):
        x, y = batch
        out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((out - y) ** 2), state

    ensemble, state = ee.build(eqx.nn.make_with_state(Counting), 3, key=BUILD_KEY)
    x, y = dataset()
    validation = (x[:4], y[:4] + jnp.array([[3.0]]))  # soon worse: other targets
    run = ee.fit(
        ensemble,
        counting_loss,
        optax.sgd(0.3),
        (x, y),
        batch_size=11,
        epochs=5,
        state=state,
        validation=validation,
        key=KEY,
    )
    index = ensemble.shared.index if ensemble.stacked.index is None else ensemble.stacked.index
    np.testing.assert_array_equal(run.state.get(index), run.best_step)
    np.testing.assert_array_equal(run.train_state.model_state.get(index), 10)
    assert (run.best_step < 10).any()
    np.testing.assert_array_equal(state.get(index), 0)


def test_a_diverged_member_is_frozen_and_named(ensemble):
    def optimiser(h):
        return optax.sgd(h["rate"])

    def fitted(rates):
        hyper = {"rate": np.array(rates, np.float32)}
        return ee.fit(ensemble, loss, optimiser, dataset(), batch_size=11, shuffle=False, steps=8, hyper=hyper, key=KEY)

    healthy = fitted([0.01, 0.02, 0.03])
    with pytest.warns(
        UserWarning, match=r"1 member\(s\) diverged and keep their last finite weights .*: 3 at step 2 \(`.*`\)\."
    ):
        run = fitted([0.01, 1e12, 0.03])
    assert run.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK]
    assert run.stopped_at.tolist() == [-1, 2, -1]
    others = np.array([0, 2])
    assert_same(run.ensemble[others], healthy.ensemble[others])
    np.testing.assert_array_equal(run.history.loss[others], healthy.history.loss[others])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.train_state.params))
    assert np.isnan(run.history.loss[1, 3:]).all()
    expected, _, _ = Alone(loss, optax.sgd(1e12))(ensemble[1], in_order(dataset(), 11, 2), keys_of(3, 2))
    assert_close(run.ensemble[1], expected, 1e-5)


def test_only_the_trainable_leaves_move(ensemble):
    only_bias = lambda leaf: eqx.is_inexact_array(leaf) and leaf.shape[-1:] == (1,)
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=11, shuffle=False, steps=6, trainable=only_bias, key=KEY)
    np.testing.assert_array_equal(run.ensemble.stacked.weight, ensemble.stacked.weight)
    alone = Alone(loss, SGD, trainable=only_bias)
    assert_alone(run, ensemble, lambda i: in_order(dataset(), 11, 6), 6, alone)


class Trunk(eqx.Module):
    trunk: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.trunk = eqx.nn.Linear(3, 4, key=k1)
        self.head = eqx.nn.Linear(4, 1, key=k2)

    def __call__(self, x):
        return self.head(jnp.tanh(self.trunk(x)))


def test_a_shared_trunk_is_constant():
    ensemble = ee.build(Trunk, ids=IDS, shared=lambda model: model.trunk, key=BUILD_KEY)
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=11, shuffle=False, steps=6, key=KEY)
    assert run.ensemble.shared.trunk.weight.shape == (4, 3)
    assert run.ensemble.stacked.trunk.weight is None
    assert_same(run.ensemble.shared, ensemble.shared)
    head = jax.tree.map(lambda _: False, ensemble[0])
    head = eqx.tree_at(lambda model: model.head, head, replace_fn=lambda node: jax.tree.map(lambda _: True, node))
    alone = Alone(loss, SGD, trainable=head)
    assert_alone(run, ensemble, lambda i: in_order(dataset(), 11, 6), 6, alone)


class Anew:
    """Restarts at each iteration, as a loader does."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("kind", ["list", "loader", "generator"])
def test_batches_of_an_iterable(ensemble, kind):
    batches = in_order(dataset(), BATCH, 3)  # the third is smaller
    endless = (batch for _ in range(1000) for batch in batches)
    iterable = {"list": batches, "loader": Anew(batches), "generator": endless}[kind]
    length = {"steps": 6} if kind == "generator" else {"epochs": 2}
    run = ee.fit(ensemble, loss, SGD, iterable, key=KEY, **length)
    arrays = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, shuffle=False, epochs=2, key=KEY)
    assert run.history.loss.shape == (MEMBERS, 6)
    assert_close(run.ensemble, arrays.ensemble, 1e-6)
    np.testing.assert_allclose(run.history.loss, arrays.history.loss, rtol=1e-6)
    if kind == "generator":
        assert next(endless) is batches[0], "no batch beyond the last step was taken"


def test_an_iterable_with_validation(ensemble):
    batches, validation = in_order(dataset(), BATCH, 3), dataset(10, seed=1)
    options = {"epochs": 4, "validation": validation, "patience": 1, "key": KEY}
    run = ee.fit(ensemble, loss, SGD, batches, **options)
    arrays = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, shuffle=False, **options)
    assert_close(run.ensemble, arrays.ensemble, 1e-6)
    np.testing.assert_allclose(run.history.validation, arrays.history.validation, rtol=1e-6)
    np.testing.assert_array_equal(run.stopped_at, arrays.stopped_at)
    np.testing.assert_array_equal(run.history.validation_step, arrays.history.validation_step)


def test_ever_new_shapes_are_warned_of_once(ensemble):
    x, y = dataset()
    batches = [(x[:rows], y[:rows]) for rows in range(1, 11)]
    with pytest.warns(UserWarning, match=r"batches of 8 different shapes .*: \(1, 1\), \(1, 3\), \(2, 1\)") as caught:
        ee.fit(ensemble, loss, SGD, batches, epochs=2, key=KEY)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["arrays", "endless", "list"])
def test_validation_of_the_last_weights(ensemble, kind):
    """Also when the run ends within an epoch, or at its end before the iterable is seen to end."""
    batches, validation = in_order(dataset(), BATCH, 3), dataset(10, seed=1)
    steps = 6 if kind == "list" else 5
    data = {"arrays": dataset(), "endless": (batch for _ in range(9) for batch in batches), "list": batches}[kind]
    arrays = {"batch_size": BATCH, "shuffle": False} if kind == "arrays" else {}
    run = ee.fit(ensemble, loss, SGD, data, steps=steps, validation=validation, key=KEY, **arrays)
    assert run.history.validation_step.tolist() == {"arrays": [3, 5], "endless": [5], "list": [3, 6]}[kind]
    last = run.train_state.ensemble
    for i in range(MEMBERS):
        value = loss(eqx.nn.inference_mode(last[i]), validation, step_key(KEY, IDS[i], steps))
        np.testing.assert_allclose(run.history.validation[i, -1], value, rtol=1e-5)
        best = run.history.validation[i].argmin()
        assert run.best_step[i] == run.history.validation_step[best]
        if run.best_step[i] == steps:
            assert_same(run.ensemble[i], last[i])


def test_patience_without_the_end_of_an_epoch(ensemble):
    endless = (batch for _ in range(9) for batch in in_order(dataset(), BATCH, 3))
    with pytest.warns(UserWarning, match="`patience` stopped no member"):
        run = ee.fit(ensemble, loss, SGD, endless, steps=5, validation=dataset(), patience=1, key=KEY)
    assert (run.best_step == 5).all()


def test_hyper_for_the_score_alone(ensemble):
    def score(model, batch, key, hyper):
        return hyper["offset"] + 0.0 * loss(model, batch, key)

    run = ee.fit(
        ensemble,
        loss,
        SGD,
        dataset(),
        epochs=1,
        validation=ee.train.Validation(dataset(10), score=score, mode="min"),
        hyper={"offset": np.arange(3.0, dtype=np.float32)},
        key=KEY,
    )
    assert run.best_score.tolist() == [0, 1, 2]


@pytest.mark.parametrize("marked", ["data", "validation"])
def test_marks_on_one_side_only(ensemble, marked):
    """A loss unpacks data and validation data in the same way, whether they are shared or per member."""
    data = {"data": dataset(), "validation": dataset(10, seed=1)}
    expected = ee.fit(ensemble, loss, SGD, batch_size=BATCH, epochs=2, key=KEY, **data)
    x, y = data[marked]
    data[marked] = (ee.Each(jnp.stack([x] * MEMBERS)), y)
    run = ee.fit(ensemble, loss, SGD, batch_size=BATCH, epochs=2, key=KEY, **data)
    np.testing.assert_allclose(run.history.validation, expected.history.validation, rtol=1e-5)


def fresh_loss():
    """Not compiled by any other test."""
    return lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_one_compile_for_a_run(ensemble, plan, compiled):
    own_loss, first, second = fresh_loss(), dataset(), dataset(seed=9)
    options = {"batch_size": BATCH, "epochs": 60, "validation": dataset(10, seed=1), "plan": plan, "key": KEY}
    with compiled() as programs:
        ee.fit(ensemble, own_loss, SGD, first, **options)
    assert programs.count("run_chunk") == 1
    with compiled() as programs:
        ee.fit(ensemble, own_loss, SGD, second, **options)
    assert programs == []


def test_another_optimiser_is_another_program(ensemble, compiled):
    own_loss, options = fresh_loss(), {"batch_size": 11, "epochs": 2, "key": KEY}
    for _ in range(2):
        with compiled() as programs:
            ee.fit(ensemble, own_loss, optax.sgd(0.1), dataset(), **options)
        assert programs.count("run_chunk") == 1


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_one_compile_for_batches_of_one_shape(ensemble, plan, compiled):
    own_loss, batches = fresh_loss(), in_order(dataset(), BATCH, 2)  # the third would be smaller
    options = {"epochs": 5, "validation": dataset(10, seed=1), "plan": plan, "key": KEY}
    with compiled() as programs:
        ee.fit(ensemble, own_loss, SGD, batches, **options)
    assert programs.count("run_batch") == programs.count("run_validation") == 1
    assert "run_chunk" not in programs
    with compiled() as programs:
        ee.fit(ensemble, own_loss, SGD, Anew(batches), **options)
    assert programs == []


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_fault_compiles_nothing(ensemble, plan, compiled):
    """Nor do other hyper-parameters: its piece is run again in parts of the shape that there is."""
    own_loss, optimiser = fresh_loss(), lambda h: optax.sgd(h["rate"])

    def fitted(rates):
        hyper = {"rate": np.array(rates, np.float32)}
        return ee.fit(
            ensemble, own_loss, optimiser, dataset(), batch_size=11, epochs=20, hyper=hyper, plan=plan, key=KEY
        )

    with compiled() as programs:
        fitted([0.01, 0.02, 0.03])
    assert programs.count("run_chunk") == 1
    with compiled() as programs:
        run = fitted([0.01, 1e12, 0.02])
    assert run.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK]
    assert programs == []


def interrupt_after(seconds):
    """Sends SIGINT so long after a run has taken over the handling of it."""

    def send():
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("moments", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_control_c_leaves_a_whole_run(ensemble, interruptible, moments, monkeypatch):
    monkeypatch.setattr(_pacing, "_SECONDS_PER_CHUNK", 0.05)  # a run ends with its chunk
    waits = random.Random(0)
    runs = []
    for _ in range(moments):
        thread = interrupt_after(waits.uniform(0, 0.3))
        run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, steps=3_000_000, key=KEY)
        thread.join()
        runs.append(run)
        assert run.interrupted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert int(run.train_state.step) == run.history.loss.shape[1] > 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.train_state.params))
        assert np.isfinite(run.ensemble(dataset()[0][0])).all()
        assert np.isfinite(ensemble(dataset()[0][0])).all()
    longest = max((run.history.loss for run in runs), key=lambda curves: curves.shape[1])
    assert len({run.history.loss.shape[1] for run in runs}) > 1
    for run in runs:
        np.testing.assert_array_equal(run.history.loss, longest[:, : run.history.loss.shape[1]])
    state, _ = ee.train.make_step(loss, SGD)(run.train_state, in_order(dataset(), BATCH, 1)[0])
    assert int(state.step) == int(run.train_state.step) + 1


def test_control_c_before_the_first_step(ensemble, interruptible, monkeypatch):
    begin = ActiveMembers.begin

    def interrupted(self, *args):
        signal.raise_signal(signal.SIGINT)
        return begin(self, *args)

    monkeypatch.setattr(ActiveMembers, "begin", interrupted)
    run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=BATCH, steps=3_000_000, key=KEY)
    assert run.interrupted
    assert 0 < run.history.loss.shape[1] < 10_000


def test_control_c_between_batches(ensemble, interruptible):
    def batches():
        for i in range(100):
            if i == 4:
                signal.raise_signal(signal.SIGINT)
            yield in_order(dataset(), BATCH, 1)[0]

    run = ee.fit(ensemble, loss, SGD, batches(), epochs=1, key=KEY)
    assert run.interrupted
    assert run.history.loss.shape == (MEMBERS, 4)  # the fifth batch was fetched while the fourth step ran


def test_a_second_control_c_ends_it_at_once(ensemble, interruptible):
    def batches():
        yield in_order(dataset(), BATCH, 1)[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ee.fit(ensemble, loss, SGD, batches(), epochs=1, key=KEY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("progress", [None, False, True])
def test_a_progress_line_where_someone_looks(ensemble, capsys, progress):
    def batches():
        for i in range(4):
            time.sleep(0.75 if progress and i else 0)
            yield in_order(dataset(), BATCH, 1)[0]

    ee.fit(ensemble, loss, SGD, batches(), epochs=1, progress=progress, key=KEY)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("3 members" in err and "4step" in err.replace(" ", "")) if progress else err == ""


def test_double_precision():
    with jax.enable_x64(True):
        ensemble = ee.build(make, ids=IDS, key=BUILD_KEY)
        run = ee.fit(ensemble, loss, SGD, dataset(), batch_size=11, shuffle=False, epochs=3, key=KEY)
        assert run.history.loss.dtype == run.ensemble.stacked.weight.dtype == np.float64
        for i, model in enumerate(ensemble.unstack()):
            expected, _, _ = Alone(loss, SGD)(model, in_order(dataset(), 11, 6), keys_of(IDS[i], 6))
            assert_close(run.ensemble[i], expected, 1e-13)


def test_a_large_batch_holds_all_rows(ensemble):
    options = {"epochs": 3, "key": KEY}
    large = ee.fit(ensemble, loss, SGD, dataset(), batch_size=10 * ROWS, **options)
    assert_same(large.history, ee.fit(ensemble, loss, SGD, dataset(), batch_size=ROWS, **options).history)


def test_a_progress_line_that_nobody_reads(monkeypatch):
    """What cannot be written is dropped: the reader of a pipe may be gone."""

    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stderr", Gone())
    with progress_line(show=True, description="fit", unit="step", total=3) as line:
        line.display()
        line.update(3)


def test_progress_lines_leave_no_threads(ensemble, capsys):
    before = threading.active_count()
    for show in (True, False):
        with progress_line(show=show, description="fit", unit="step", total=3) as line:
            line.update(3)
    assert threading.active_count() == before


def test_a_notebook_shows_the_line_of_the_outermost_call(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    line = ft.partial(progress_line, show=None, description="fit", unit="step", total=3)
    for _ in range(2):
        with line() as outer, line() as inner:
            assert (outer.disable, inner.disable) == (False, True)
