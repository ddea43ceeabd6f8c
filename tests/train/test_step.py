"""A step of all members for a loop of one's own, and shared leaves that members train together."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close, assert_same
from .reference import Member, key_of_member

KEY, MEMBERS = jax.random.key(5), 4
X = jax.random.normal(jax.random.key(1), (8, 3))
Y = jnp.sin(X[:, 0])
ADAM = optax.adam(1e-2)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


STEP = ee.train.make_step(loss, ADAM)


@pytest.mark.parametrize("plan", [None, ee.plan.Blocks(3)], ids=["at once", "in blocks"])
def test_steps_are_those_of_a_plain_loop(plan):
    state = ee.train.init(ensemble(), ADAM, key=KEY)
    step = STEP if plan is None else ee.train.make_step(loss, ADAM, plan=plan)
    losses = []
    for _ in range(4):
        state, metrics = step(state, (X, ee.Each(jnp.stack([Y] * MEMBERS))))
        losses.append(metrics.loss)
    for i in range(MEMBERS):
        alone = Member(loss, ADAM).fit(ensemble()[i], (X, Y), steps=4, key=key_of_member(KEY, i), shuffle=False)
        assert_close(state.ensemble[i], alone.model, 1e-5)
        np.testing.assert_allclose([own[i] for own in losses], alone.losses, rtol=1e-5)
    assert state.step.tolist() == [4] * MEMBERS


def test_a_loop_in_a_program_is_a_loop_of_steps():
    first = state = ee.train.init(ensemble(), ADAM, key=KEY)
    for _ in range(5):
        state, metrics = STEP(state, (X, Y))
    scanned, all_metrics = ee.train.scan_steps(STEP, first, (jnp.stack([X] * 5), jnp.stack([Y] * 5)))
    assert_close(scanned.ensemble, state.ensemble, 1e-6)
    assert all_metrics.loss.shape == (5, MEMBERS)
    np.testing.assert_allclose(all_metrics.loss[-1], metrics.loss, rtol=1e-5)
    counted, _ = ee.train.scan_steps(lambda state, _: (state + 1, None), jnp.int32(0), length=7)
    assert counted == 7


def test_a_run_goes_on_by_steps():
    run = ee.fit(ensemble(), loss, ADAM, (X, Y), steps=3, shuffle=False, key=KEY)
    state, _ = STEP(run.train_state, (X, Y))
    assert_close(state.ensemble, ee.fit(ensemble(), loss, ADAM, (X, Y), steps=4, shuffle=False, key=KEY).ensemble, 1e-5)


def test_a_member_that_fails_keeps_what_it_had():
    state = ee.train.init(ensemble(), ADAM, key=KEY)
    state, _ = STEP(state, (X, Y))
    bad = jnp.stack([Y] * MEMBERS).at[2].set(jnp.nan)
    after, metrics = STEP(state, (X, ee.Each(bad)))
    assert metrics.status.tolist() == [0, 0, 2, 0]
    assert_same(after.ensemble[2], state.ensemble[2])
    assert after.step.tolist() == [2, 2, 1, 2]
    assert after.stopped_at.tolist() == [-1, -1, 1, -1]
    assert after.stop().status.tolist() == [1, 1, 2, 1]
    _, metrics = STEP(after, (X, Y))
    assert np.isnan(metrics.loss[2])


def test_the_state_before_a_step_stays():
    state = ee.train.init(ensemble(), ADAM, key=KEY)
    STEP(state, (X, Y))
    assert_same(state.ensemble, ensemble())


class Bounded(eqx.Module):
    mlp: eqx.nn.MLP
    lower: jax.Array

    def __init__(self, key):
        self.mlp, self.lower = eqx.nn.MLP(3, 2, 8, 1, key=key), jnp.array(-1.0)

    def __call__(self, x):
        mean, log_var = self.mlp(x)
        return mean, self.lower + jax.nn.softplus(log_var - self.lower)


def nll(model, batch, key):
    mean, log_var = jax.vmap(model)(batch[0])
    return jnp.mean((mean - batch[1]) ** 2 * jnp.exp(-log_var) + log_var) - 0.01 * model.lower


class TestTogether:
    optimiser = ee.train.Together(optax.adam(1e-2), shared=optax.sgd(0.1, momentum=0.9))

    @ft.cached_property
    def members(self):
        return ee.build(Bounded, MEMBERS, shared=lambda model: model.lower, key=KEY)

    def by_hand(self, steps):
        models, lower = list(self.members), self.members.stacked.lower
        own, shared = optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)
        states, state = (
            [own.init(model.mlp if False else eqx.filter(model.mlp, eqx.is_array)) for model in models],
            shared.init(lower),
        )
        for _ in range(steps):
            grads = [
                eqx.filter_grad(nll)(eqx.tree_at(lambda m: m.lower, model, lower), (X, Y), None) for model in models
            ]
            for i, (model, grad) in enumerate(zip(models, grads, strict=True)):
                with jax.numpy_dtype_promotion("standard"):
                    update, states[i] = own.update(eqx.filter(grad.mlp, eqx.is_array), states[i])
                models[i] = eqx.tree_at(lambda m: m.mlp, model, eqx.apply_updates(model.mlp, update))
            with jax.numpy_dtype_promotion("standard"):
                update, state = shared.update(sum(grad.lower for grad in grads) / MEMBERS, state)
            lower = lower + update
        return models, lower

    def test_members_share_the_mean_gradient(self):
        options = {"steps": 5, "shuffle": False, "key": KEY}
        run = ee.fit(self.members, nll, self.optimiser, (X, Y), **options)
        models, lower = self.by_hand(5)
        np.testing.assert_allclose(run.ensemble.stacked.lower, lower, rtol=1e-5)
        assert run.ensemble.axes == self.members.axes
        for i, model in enumerate(models):
            assert_close(run.ensemble[i].mlp, model.mlp, 1e-5)
        state, step = ee.train.init(self.members, self.optimiser, key=KEY), ee.train.make_step(nll, self.optimiser)
        for _ in range(5):
            state, _ = step(state, (X, Y))
        np.testing.assert_allclose(state.ensemble.stacked.lower, lower, rtol=1e-5)

    def test_a_broken_member_has_no_part(self):
        y = jnp.stack([Y] * MEMBERS).at[1].set(jnp.nan)
        with pytest.warns(UserWarning, match="members 1 diverged"):
            run = ee.fit(self.members, nll, self.optimiser, (X, ee.Each(y)), steps=3, shuffle=False, key=KEY)
        assert np.isfinite(run.ensemble.stacked.lower)
        assert run.status.tolist() == [0, 2, 0, 0]

    def test_a_stopped_member_has_no_part(self):
        state, step = ee.train.init(self.members, self.optimiser, key=KEY), ee.train.make_step(nll, self.optimiser)
        stopped, _ = step(state.stop(jnp.arange(MEMBERS) == 1), (X, Y))
        others, _ = step(state[[0, 2, 3]], (X, Y))
        np.testing.assert_allclose(stopped.ensemble.stacked.lower, others.ensemble.stacked.lower, rtol=1e-6)

    def test_members_stop_together_at_their_best(self):
        run = ee.fit(self.members, nll, self.optimiser, (X, Y), epochs=200, validation=(X + 1, -Y), patience=3, key=KEY)
        assert len(set(run.stopped_at.tolist())) == 1
        best = int(run.best_step[0])
        again = ee.fit(self.members, nll, self.optimiser, (X, Y), steps=best, key=KEY)
        assert_close(run.ensemble, again.ensemble, 1e-5)

    def test_members_that_share_nothing_are_refused(self):
        alone = ee.build(Bounded, MEMBERS, key=KEY)
        with pytest.raises(ValueError, match="this ensemble has none"):
            ee.train.init(alone, self.optimiser, key=KEY)
