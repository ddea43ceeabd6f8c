"""Scores decide as numbers of their own precision, and a member's state may be set outside of `jax.vmap`."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import grouped

KEY = jax.random.key(0)
MEMBERS, EPOCHS = 3, 30


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def close_to_one(model, batch, key):
    """A score whose differences are below float32's rounding."""
    return 1 + 1e-9 * loss(model, batch, key)


def to_nothing(model, batch, key):
    """A score below all float32's numbers."""
    return 1e-80 * loss(model, batch, key)


def expected(scores, *, patience, min_delta, target):
    """When patience or target end each member, and the best before that, by the rules in the documentation."""
    lefts, bests = [], []
    for curve in scores:
        best, best_epoch, waited = np.inf, -1, 0
        for epoch, score in enumerate(curve):  # noqa: B007 (used after the loop)
            waited += 1
            if score < best - min_delta:
                best, best_epoch, waited = score, epoch, 0
            if waited >= patience or score <= target:
                break
        else:
            epoch = -2
        lefts.append(epoch + 1)
        bests.append(best_epoch + 1)
    return lefts, bests


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("score", [close_to_one, to_nothing])
def test_scores_of_double_precision_decide(score, mode, tmp_path):
    sign = 1 if mode == "min" else -1
    scored = lambda model, batch, key: sign * score(model, batch, key)
    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key, dtype=jnp.float64), MEMBERS, key=KEY)
        x = jnp.linspace(0, 1, 8)[:, None]
        rows = (x, 2 * x + 1)
        judged = {"validation": rows, "score": scored, "mode": mode, "epochs": EPOCHS, "key": KEY}
        run = lambda **more: ee.fit(ensemble, loss, optax.sgd(0.3), rows, **grouped(judged | more))
        free = run().history.validation
        assert free.dtype == np.float64
        curves, middle = sign * free, EPOCHS // 2
        delta = float(curves[0, middle] - curves[0, middle + 1])  # what one member gains there, less than float32 sees
        for limit in ({"patience": 2, "min_delta": delta}, {"target": float(free[1, middle])}):
            rules = {"patience": 10**6, "min_delta": 0.0, "target": -sign * np.inf} | limit
            lefts, bests = expected(curves, **rules | {"target": sign * rules["target"]})
            assert any(0 < left < EPOCHS for left in lefts)  # or nothing would be tested
            stopped = run(**limit, checkpoint=tmp_path / str(len(limit)))
            assert (stopped.stopped_at.tolist(), stopped.best_step.tolist()) == (lefts, bests)
            again = run(**limit, checkpoint=tmp_path / str(len(limit)))  # a checkpoint holds as many digits
            assert again.best_score.tolist() == stopped.best_score.tolist()
            best = min(range(MEMBERS), key=lambda member: sign * stopped.best_score[member])
            assert stopped.best().ids.tolist() == [best]


def test_scores_of_single_precision_stay_so_with_doubles():
    """A target of 0.1 is the score's 0.1, as it is without doubles."""

    def tenth(model, batch, key):
        return jnp.float32(0.1)

    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key, dtype=jnp.float32), 2, key=KEY)
        rows = (jnp.ones((4, 1), jnp.float32), jnp.ones((4, 1), jnp.float32))
        run = ee.fit(
            ensemble,
            loss,
            optax.sgd(0.1),
            rows,
            epochs=3,
            validation=ee.train.Validation(rows, score=tenth, mode="min"),
            stop=ee.train.Stopping(target=0.1),
            key=KEY,
        )
    assert run.history.validation.dtype == run.best_score.dtype == np.float32
    assert run.stopped_at.tolist() == [1, 1]


class Counting(eqx.Module):
    """Counts its own losses, in a state that no `jax.vmap` copies."""

    layer: eqx.nn.Linear
    count: eqx.nn.StateIndex

    def __init__(self, key):
        self.layer = eqx.nn.Linear(3, 1, key=key)
        self.count = eqx.nn.StateIndex(jnp.zeros(()))


def counting(model, state, batch, key):
    x, y = batch
    state = state.set(model.count, state.get(model.count) + 1)
    return jnp.mean((jax.vmap(model.layer)(x) - y) ** 2), state


@pytest.mark.parametrize("optimiser", [optax.adam(1e-2), optax.lbfgs()], ids=["adam", "line search"])
def test_a_state_may_be_set_in_the_loss(optimiser):
    ensemble, state = ee.build(eqx.nn.make_with_state(Counting), 2, key=KEY)
    rows = (jax.random.normal(KEY, (12, 3)), jnp.ones((12, 1)))
    options = {"state": state, "epochs": 2, "batch_size": 6, "key": KEY}
    run = ee.fit(ensemble, counting, optimiser, rows, validation=rows, **options)
    (count,) = jax.tree.leaves(run.train_state.model_state)
    assert count.tolist() == [4, 4]  # one a step: neither a line search nor a validation leaves its state behind
    train_state = ee.train.init(ensemble, optimiser, state=state, key=KEY)
    after, _ = ee.train.make_step(counting, optimiser)(train_state, rows)
    assert jax.tree.leaves(after.model_state)[0].tolist() == [1, 1]


def test_scores_that_are_undefined_are_named():
    """Of the members that trained, at the first step; a member that was stopped earlier has no score there."""
    ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), MEMBERS, key=KEY)
    rows = (np.linspace(0, 1, 8, dtype=np.float32)[:, None], np.ones((8, 1), np.float32))
    options = {"epochs": 2, "validation": rows, "mode": "min", "key": KEY, "progress": False}
    bound = float(np.sort(np.asarray(ensemble.stacked.weight).ravel())[1])
    score = lambda model, batch, key: jnp.where(model.weight[0, 0] < bound, jnp.nan, loss(model, batch, key))
    index = int(np.argmin(ensemble.stacked.weight))
    with pytest.warns(UserWarning, match=rf"validation scores that are NaN, .*\(id, step\): {index} at step 1\.\n"):
        ee.fit(ensemble, loss, optax.sgd(1e-6), rows, **grouped(options | {"score": score}))
    halving = {**options, "epochs": 1, "hyper": {"lr": np.full(MEMBERS, 1e-6, np.float32)}}
    optimiser, undefined = lambda h: optax.sgd(h["lr"]), lambda model, batch, key: loss(model, batch, key) * jnp.nan
    for method in (ee.methods.successive_halving, ft.partial(ee.methods.population_based_training, rounds=2)):
        with pytest.warns(UserWarning, match="that are NaN"), pytest.raises(ValueError, match="cannot compare members"):
            method(ensemble, loss, optimiser, rows, **grouped(halving | {"score": undefined}))
