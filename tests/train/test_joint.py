"""Losses of all members: gradients and runs written out by hand, and losses whose members do not meet after all."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import CASES, assert_close, assert_same, data
from .reference import key_of_member, stream_of

KEY, MEMBERS, ALPHA = jax.random.key(5), 6, 0.95
X = jax.random.normal(jax.random.key(1), (8, 3))
Y = jnp.sin(X[:, 0])
ADAM = optax.adam(1e-2)


def predict(model, batch, key):
    return jax.vmap(model)(batch[0])


def crps(predictions, batch):
    return ee.scores.crps(predictions, batch[1], estimator="fair", alpha=ALPHA)


def pairs(predictions, targets):
    """The almost fair CRPS by its definition, over all pairs of members."""
    count = len(predictions)
    share = (1 - (1 - ALPHA) / count) / (2 * count * (count - 1))
    apart = jnp.abs(predictions[:, None] - predictions[None]).sum((0, 1))
    return jnp.mean(jnp.abs(predictions - targets[None]).mean(0) - share * apart)


JOINT = ee.train.JointLoss(predict, crps)


def make(key):
    return eqx.nn.MLP(3, "scalar", 8, 1, key=key)


@ft.cache
def ensemble():
    return ee.build(make, MEMBERS, key=KEY)


def by_hand(loss, batches, *, members=None, trains=lambda step: jnp.ones(MEMBERS)):
    """Adam of each member on the gradient of one function of all weights; those that no longer train are left."""
    params, rest = eqx.partition((members or ensemble()).stacked, eqx.is_inexact_array)
    everyone = lambda params, x: jax.vmap(lambda one: jax.vmap(eqx.combine(one, rest))(x))(params)
    slope = jax.jit(jax.value_and_grad(lambda params, x, y: loss(everyone(params, x), y)))
    state, losses = jax.vmap(ADAM.init)(params), []
    for i, (x, y) in enumerate(batches):
        value, grads = slope(params, x, y)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.vmap(ADAM.update)(grads, state)
        on = trains(i)
        params = jax.tree.map(lambda p, u, on=on: p + u * on.reshape(-1, *[1] * (u.ndim - 1)), params, updates)
        losses.append(value)
    return eqx.combine(params, rest), losses


def fit(loss=JOINT, optimiser=ADAM, data=(X, Y), **options):
    return ee.fit(ensemble(), loss, optimiser, data, **({"epochs": 4, "batch_size": 4, "key": KEY} | options))


@pytest.mark.parametrize(
    "options",
    [{}, {"plan": ee.plan.Blocks(2)}, {"mesh": (4, 1)}, {"mesh": (2, 2)}],
    ids=["at once", "blocks", "with copies that fill a mesh", "rows on a mesh"],
)
def test_a_run_is_that_of_all_weights_by_hand(options):
    mesh = {"mesh": ee.make_mesh(*options["mesh"])} if "mesh" in options else {}
    run = ee.fit(ensemble(), JOINT, ADAM, (X, Y), steps=6, shuffle=False, key=KEY, **(options | mesh))
    stacked, losses = by_hand(pairs, [(X, Y)] * 6)
    assert_close(run.ensemble.stacked, stacked, 1e-5 if mesh else 2e-6)
    np.testing.assert_allclose(run.history.loss, np.tile(losses, (MEMBERS, 1)), rtol=1e-5)


def test_all_see_the_rows_of_the_first():
    run = ee.fit(ensemble(), JOINT, ADAM, (X, Y), batch_size=3, steps=5, key=KEY)
    rows = stream_of(key_of_member(KEY, 0), 15, 8).reshape(5, 3)
    stacked, losses = by_hand(pairs, [(X[own], Y[own]) for own in rows])
    assert_close(run.ensemble.stacked, stacked, 2e-6)
    batches = ee.fit(ensemble(), JOINT, ADAM, [(X[own], Y[own]) for own in rows], steps=5, key=KEY)
    assert_close(batches.ensemble.stacked, stacked, 2e-6)
    np.testing.assert_allclose(batches.history.loss[0], losses, rtol=1e-5)


def test_steps_and_a_member_that_stopped():
    """Its predictions stay in the loss, in `fit` from the end of the epoch at which it stopped."""
    batches = [(X[own], Y[own]) for own in stream_of(key_of_member(KEY, 0), 24, 8).reshape(6, 4)]
    trains = lambda step: jnp.ones(MEMBERS) if step < 2 else jnp.ones(MEMBERS).at[0].set(0)
    stacked, _ = by_hand(pairs, batches, trains=trains)
    stop = ee.train.Stopping(steps=[2, 99, 99, 99, 99, 99])
    run = fit(epochs=3, stop=stop)
    assert run.train_state.step.tolist() == [2, 6, 6, 6, 6, 6]
    assert_close(run.ensemble.stacked, stacked, 2e-6)
    step, state = ee.train.make_step(JOINT, ADAM, plan=ee.plan.Blocks(2)), ee.train.init(ensemble(), ADAM, key=KEY)
    for i, batch in enumerate(batches):
        state = state.stop([0]) if i == 2 else state
        state, metrics = step(state, batch)
    assert_close(state.ensemble.stacked, stacked, 2e-6)
    assert np.isnan(metrics.loss).tolist() == [True, False, False, False, False, False]


def test_almost_fair_crps_of_linear_members():
    """Signs of errors and of differences, the gradient of the closed form."""
    members = ee.build(lambda key: eqx.nn.Linear(3, "scalar", use_bias=False, key=key), MEMBERS, key=KEY)
    run = ee.fit(members, JOINT, optax.sgd(0.1), (X, Y), steps=5, shuffle=False, key=KEY)
    x, y = np.asarray(X, np.float64), np.asarray(Y, np.float64)
    w = np.asarray(members.stacked.weight, np.float64)[:, 0]
    share = (1 - (1 - ALPHA) / MEMBERS) / (MEMBERS * (MEMBERS - 1))
    for _ in range(5):
        f = w @ x.T
        slope = np.sign(f - y) / MEMBERS - share * np.sign(f[:, None] - f[None]).sum(1)
        w = w - 0.1 * slope @ x / len(x)
    np.testing.assert_allclose(run.ensemble.stacked.weight[:, 0], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.95])
def test_members_that_differ_by_weights_alone_become_quantiles(alpha):
    """Of constants, where the closed form of the slope is zero; by the fair score they are spread too wide."""
    y, k = (np.arange(1000) + 0.5).astype(np.float32) / 1000, np.arange(1, 6)
    crps = lambda predictions, y: ee.scores.crps(predictions, y, estimator="fair", alpha=alpha)
    loss = ee.train.JointLoss(lambda level, batch, key: jnp.broadcast_to(level, batch.shape), crps)
    levels = ee.from_stacked(jnp.linspace(0.3, 0.6, 5))
    run = ee.fit(levels, loss, optax.sgd(0.5), y, batch_size=1000, steps=200, key=KEY)
    want = 0.5 + (1 - (1 - alpha) / 5) * (2 * k - 6) / 8
    np.testing.assert_allclose(run.ensemble.stacked, want, atol=2e-3)
    if alpha == 0:
        np.testing.assert_allclose(want, (2 * k - 1) / 10)


@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_the_score_is_between_the_two_estimators(alpha):
    samples = jax.random.normal(KEY, (5, 40))
    nrg, fair = (ee.scores.crps(samples, samples[0] + 1, estimator=name) for name in ("nrg", "fair"))
    found = ee.scores.crps(samples, samples[0] + 1, estimator="fair", alpha=alpha)
    np.testing.assert_allclose(found, alpha * fair + (1 - alpha) * nrg, rtol=1e-5)
    with pytest.raises(ValueError, match="`alpha` with"):
        ee.scores.crps(samples, samples[0], alpha=0.5)


class TestNegativeCorrelation:
    """Liu and Yao 1999: the slope of member m's penalised error is `f_m - y - strength * (f_m - mean)`."""

    def run(self, strength):
        def loss(predictions, batch):
            apart = predictions - predictions.mean(0, keepdims=True)
            return jnp.sum(jnp.mean((predictions - batch[1][None]) ** 2 - strength * apart**2, axis=1)) / 2

        return ee.fit(ensemble(), ee.train.JointLoss(predict, loss), ADAM, (X, Y), steps=5, shuffle=False, key=KEY)

    def test_without_it_members_are_independent(self):
        loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2) / 2
        alone = ee.fit(ensemble(), loss, ADAM, (X, Y), steps=5, shuffle=False, key=KEY)
        assert_close(self.run(0.0).ensemble, alone.ensemble, 2e-6)

    def test_at_one_the_mean_is_one_model(self):
        """The errors of members minus their spread are the error of the mean: the ambiguity decomposition."""
        mean_alone = lambda predictions, y: MEMBERS / 2 * jnp.mean((predictions.mean(0) - y) ** 2)
        stacked, losses = by_hand(mean_alone, [(X, Y)] * 5)
        run = self.run(1.0)
        assert_close(run.ensemble.stacked, stacked, 2e-5)
        np.testing.assert_allclose(run.history.loss[0], losses, rtol=1e-5)


def test_the_loss_is_computed_once():
    """Not once for each member: no array of members of all members, forwards or backwards."""
    marked = ee.train.JointLoss(predict, lambda predictions, batch: jnp.mean(jnp.cos(predictions - batch[1][None])))
    step, state = ee.train.make_step(marked, ADAM), ee.train.init(ensemble(), ADAM, key=KEY)
    program = str(eqx.filter_make_jaxpr(step)(state, (X, Y))[0])
    assert set(re.findall(r":f32\[([\d,]+)\] = (?:cos|sin) ", program)) == {"6,8"}
    assert "6,6,8" not in program


@pytest.mark.parametrize("name", ["conv and batch norm", "recurrent"])
def test_a_sum_of_members_own_losses_is_independent(name):
    """With states, outputs, keys and hyperparameters of their own; convolutions are replaced on CPUs."""
    case, batch = CASES[name], data()
    members = ee.build(case.make, 3, key=KEY)
    members, state = members if isinstance(members, tuple) else (members, None)
    by_rate, hyper = lambda hyper: optax.sgd(hyper["lr"]), {"lr": jnp.array([0.1, 0.05, 0.02])}
    if state is None:
        own = lambda model, batch, key, hyper: case.loss(model, batch, key) * hyper["lr"]
        alone = lambda model, batch, key, hyper: (own(model, batch, key, hyper), hyper["lr"])
    else:
        own = lambda model, state, batch, key: case.loss(model, state, batch, key)
        alone = lambda model, state, batch, key, hyper: (*case.loss(model, state, batch, key), hyper["lr"])
    joint = ee.train.JointLoss(own, lambda losses, batch: (jnp.sum(losses), losses))
    options = {"steps": 3, "shuffle": False, "has_aux": True, "state": state, "hyper": hyper, "key": KEY}
    together = ee.fit(members, joint, by_rate, batch, **options)
    apart = ee.fit(members, alone, by_rate, batch, plan=ee.plan.Vmap(), **options)
    parts = lambda run: (run.ensemble, run.train_state.model_state)
    assert_close(parts(together), parts(apart), 1e-4)
    assert together.history.aux.shape == (3, 3, 3)
    np.testing.assert_allclose(together.history.aux[0], apart.history.loss.T, rtol=1e-4)


def test_a_shared_trunk_descends_the_whole_gradient():
    """A shallow ensemble: heads of their own on one trunk, trained by the likelihood of their mean and variance."""

    def nll(predictions, y):
        variance = predictions.var(0, ddof=1) + 0.1
        return jnp.mean((predictions.mean(0) - y) ** 2 / variance + jnp.log(variance)) / 2

    shared = ee.build(make, 4, shared=lambda model: model.layers[0], key=KEY)
    optimiser = ee.train.Together(optax.sgd(0.1), shared=optax.sgd(0.1))
    joint = ee.train.JointLoss(predict, lambda predictions, batch: nll(predictions, batch[1]))
    run = ee.fit(shared, joint, optimiser, (X, Y), steps=4, shuffle=False, validation=(X, Y), key=KEY)
    params, rest = eqx.partition(shared.stacked, eqx.is_inexact_array)
    axes = jax.tree.map(lambda x: 0, params)
    axes = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), axes, (None, None))
    everyone = jax.vmap(lambda one: jax.vmap(eqx.combine(one, rest))(X), in_axes=(axes,))
    for _ in range(4):
        grads = jax.grad(lambda params: nll(everyone(params), Y))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(run.train_state.ensemble.stacked, eqx.combine(params, rest), 1e-5)


def test_all_stop_at_their_best_and_resume(tmp_path):
    """Also where the score alone is that of all."""
    options = {"validation": (X + 1, -Y), "patience": 2}
    whole = fit(epochs=60, **options)
    assert len(set(whole.stopped_at.tolist())) == len(set(whole.best_score.tolist())) == 1
    assert 0 < whole.stopped_at[0] < 120
    saved = tmp_path / "run.eqx"
    fit(epochs=3, checkpoint=saved, **options)
    assert_same(fit(epochs=60, checkpoint=saved, **options).train_state, whole.train_state)
    own = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
    scored = fit(own, validation=ee.train.Validation((X, Y), score=JOINT, mode="min"), epochs=2)
    np.testing.assert_allclose(scored.best_score, pairs(scored.predict(X), Y), rtol=1e-5)


def test_one_that_is_not_finite_ends_the_run_of_all():
    broken = eqx.tree_at(lambda e: e.stacked.layers[0].bias, ensemble(), replace_fn=lambda b: b.at[1].set(jnp.nan))
    with pytest.warns(UserWarning, match="all members diverged.*One member's"):
        run = ee.fit(broken, JOINT, ADAM, (X, Y), epochs=2, key=KEY)
    assert run.status.tolist() == [2] * MEMBERS
    assert_same(run.ensemble, broken)


WRONG = {
    "data per member": (lambda: fit(data=(ee.Each(jnp.stack([X] * MEMBERS)), Y)), "`data` cannot be per member"),
    "rows per member": (lambda: fit(rows=np.zeros((MEMBERS, 8), int)), "`rows` cannot be per member"),
    "validation per member": (
        lambda: fit(validation=(X, ee.Each(jnp.stack([Y] * MEMBERS)))), "`validation` cannot be per member",
    ),
    "a batch per member": (
        lambda: fit(data=[(X, ee.Each(jnp.stack([Y] * MEMBERS)))], batch_size=None), "`batch` cannot be per member",
    ),
    "a step on such a batch": (
        lambda: ee.train.make_step(JOINT, ADAM)(
            ee.train.init(ensemble(), ADAM, key=KEY), (X, ee.Each(jnp.stack([Y] * MEMBERS)))
        ),
        "`batch` cannot be per member",
    ),
    "a line search": (lambda: fit(optimiser=optax.lbfgs()), "line search"),
    "predictions without a key": (
        lambda: fit(ee.train.JointLoss(lambda model, batch: batch, crps)), r"called `loss\(model, batch, key\)`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name):
    call, message = WRONG[name]
    with pytest.raises(TypeError, match=message):
        call()
