"""Hyper-parameters that change in training and that the optimiser's `init` keeps in its state.

`optax.inject_hyperparams` reads its state; plain SGD, which reads `hyper` at every step, is the reference.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
DATA = X, np.sin(X[:, :1])
OLD, NEW = np.float32([0.1, 0.05, 0.1]), np.float32([0.1, 0.01, 0.2])
PLAIN = lambda h: optax.sgd(h["lr"], momentum=0.9)
INJECTED = lambda h: optax.inject_hyperparams(optax.sgd)(learning_rate=h["lr"], momentum=0.9)
CLIPPED = lambda h: optax.chain(optax.clip(1e6), optax.apply_if_finite(INJECTED(h), 3))
# Its first state is that of the first value, its later ones those of the schedule, which `update` makes of `hyper`.
SCHEDULED = lambda h: optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(h["lr"], h["lr"], 9), momentum=0.9)


def mse(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


def state_of(optimiser, lr=OLD):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 3, key=KEY)
    return ee.train.init(ensemble, optimiser, hyper={"lr": lr}, key=KEY)


def stepped(state, optimiser, count=2):
    step = ee.train.make_step(mse, optimiser)
    for _ in range(count):
        state, _ = step(state, DATA)
    return state


fit = lambda start, optimiser: ee.fit(start, mse, optimiser, DATA, steps=2, batch_size=8, key=KEY, progress=False)
edited = lambda state: eqx.tree_at(lambda state: state.hyper, state, {"lr": jnp.asarray(NEW)})
chosen = lambda hyper, key: {"lr": hyper["lr"] * 0.3}
WAYS = {
    "fit": lambda state, optimiser: fit(edited(state), optimiser).train_state,
    "a run": lambda state, optimiser: (
        fit(eqx.tree_at(lambda run: run.train_state, fit(state, optimiser), replace_fn=edited), optimiser).train_state
    ),
    "make_step": lambda state, optimiser: stepped(edited(state), optimiser),
    "twice": lambda state, optimiser: stepped(edited(stepped(edited(state), optimiser)), optimiser),
    "inside jit": lambda state, optimiser: eqx.filter_jit(ft.partial(stepped, optimiser=optimiser))(edited(state)),
    "scan_steps": lambda state, optimiser: ee.train.scan_steps(
        ee.train.make_step(mse, optimiser), edited(state), jax.tree.map(lambda x: np.stack([x, x]), DATA)
    )[0],
    "set_hyper": lambda state, optimiser: (
        fit(ee.methods.population.set_hyper(state, [1, 2], chosen, key=KEY), optimiser).train_state
    ),
    "a copy": lambda state, optimiser: (
        fit(
            ee.methods.population.set_hyper(ee.methods.population.clone(state, [0, 0, 2]), [1], chosen, key=KEY),
            optimiser,
        ).train_state
    ),
}


@pytest.mark.parametrize(
    ("way", "optimiser"), [*((way, INJECTED) for way in WAYS), ("make_step", CLIPPED), ("make_step", SCHEDULED)]
)
def test_new_values_are_used(way, optimiser):
    want, got = (WAYS[way](stepped(state_of(fn), fn), fn) for fn in (PLAIN, optimiser))
    np.testing.assert_array_equal(got.hyper["lr"], want.hyper["lr"])
    np.testing.assert_allclose(got.params.weight, want.params.weight, rtol=1e-6)
    assert not np.allclose(want.params.weight, stepped(state_of(PLAIN), PLAIN, 4).params.weight, rtol=1e-3)


def revived(optimiser, how):
    lost = stepped(state_of(optimiser), optimiser)
    lost = eqx.tree_at(lambda state: state.moving.status, lost, lost.status.at[1].set(ee.train.Status.DIVERGED))
    return stepped(ee.train.revive(lost, optimiser, how, key=KEY)[0], optimiser)


@pytest.mark.parametrize("make", [None, lambda key: eqx.nn.Linear(3, 1, key=key)], ids=["a copy", "anew"])
def test_revived_members_use_their_new_values(make):
    want, got = (revived(fn, ee.train.Revive(make, perturb=chosen)) for fn in (PLAIN, INJECTED))
    assert want.hyper["lr"][1] != OLD[1]
    np.testing.assert_allclose(got.params.weight, want.params.weight, rtol=1e-6)


def test_a_population_uses_its_new_values():
    ranges = {"lr": ee.sweep.LogUniform(1e-3, 1e-1)}
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=KEY)
    want, got = (
        ee.methods.population_based_training(
            ensemble, mse, optimiser, DATA, hyper=ee.sweep.draw(ranges, 4, key=KEY), validation=(X[:8], X[:8, :1]),
            rounds=3, epochs=1, explore=ee.methods.population.perturb_hyper(ranges), key=KEY, progress=False,
        )
        for optimiser in (PLAIN, INJECTED)
    )  # fmt: skip
    np.testing.assert_array_equal(got.run.train_state.hyper["lr"], want.run.train_state.hyper["lr"])
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)


def test_a_state_that_was_edited_by_hand_is_kept():
    """As optax documents it; and a later change of `hyper` cannot tell what it should replace."""
    state = eqx.tree_at(lambda s: s.opt_state.hyperparams["learning_rate"], state_of(INJECTED), jnp.asarray(NEW))
    want = stepped(state_of(PLAIN, NEW), PLAIN)
    np.testing.assert_allclose(stepped(state, INJECTED).params.weight, want.params.weight, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`train.make_step` cannot use the new values of `hyper\['lr'\]` of member"):
        stepped(eqx.tree_at(lambda s: s.hyper, state, {"lr": jnp.asarray(NEW * 3)}), INJECTED)


def test_a_first_value_that_training_has_changed():
    optimiser = lambda h: optax.adagrad(0.1, initial_accumulator_value=h["lr"])
    begun = edited(state_of(optimiser))  # before the first step it is the first value
    np.testing.assert_allclose(
        stepped(begun, optimiser).params.weight, stepped(state_of(optimiser, NEW), optimiser).params.weight
    )
    message = r"`fit` cannot use the new values of `hyper\['lr'\]` of member\(s\) 1, 2: .* only to initialise its state"
    with pytest.raises(ValueError, match=message):
        fit(edited(stepped(state_of(optimiser), optimiser)), optimiser)


def test_a_state_holds_only_what_init_uses():
    assert state_of(PLAIN).fixed.opt_hyper is None
    lr = state_of(lambda h: optax.chain(INJECTED(h), optax.scale(h["lr"]))).fixed.opt_hyper["lr"]
    np.testing.assert_array_equal(lr, OLD)
