"""An optimiser that was given one number per member where optax takes one number."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
RATES = jnp.array([0.1, 0.2, 0.3, 0.4])
WIDE = ee.build(lambda key: eqx.nn.MLP(4, 4, 4, 1, key=key), 4, key=KEY)  # the last axis of all weights is of length 4
DATA = jnp.ones((8, 4)), jnp.zeros((8, 4))


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fit(optimiser, ensemble=WIDE, **options):
    return ee.fit(ensemble, loss, optimiser, DATA, steps=2, key=KEY, **options)


WRONG = {
    "sgd": (lambda: optax.sgd(RATES), "learning_rate"),
    "adam": (lambda: optax.adam(np.asarray(RATES)), "learning_rate"),
    "weight decay": (lambda: optax.adamw(1e-3, weight_decay=RATES), "weight_decay"),
    "momentum": (lambda: optax.sgd(1e-3, momentum=RATES), "decay"),
    "b1": (lambda: optax.adam(1e-3, b1=RATES), "b1"),
    "clip": (lambda: optax.chain(optax.clip(RATES), optax.sgd(0.1)), "max_delta"),
    "masked": (
        lambda: optax.masked(optax.sgd(RATES[:, None]), lambda tree: jax.tree.map(lambda x: x.ndim == 1, tree)),
        "learning_rate",
    ),
    "chained": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATES)), "learning_rate"),
    "accumulated": (
        lambda: optax.MultiSteps(optax.sgd(RATES), 2).gradient_transformation(),
        "learning_rate",
    ),
    "injected": (lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=RATES), "learning_rate"),
    "a schedule": (lambda: optax.adam(optax.cosine_decay_schedule(RATES, 10)), "init_value"),
    "joined schedules": (
        lambda: optax.sgd(
            optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, RATES, 4)], [3])
        ),
        "end_value",
    ),
    "a column": (lambda: optax.sgd(RATES[:, None]), "learning_rate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused(case):
    make, word = WRONG[case]
    optimiser = make()
    for call in (fit, lambda optimiser: ee.train.init(WIDE, optimiser, key=KEY)):
        with pytest.raises(ValueError, match="needs an optimiser of one member") as info:
            call(optimiser)
        text = str(info.value)
        assert f"this one holds `{word}` as an array (4," in text
        assert f"Pass `hyper={{'{word}': ...}}` with the array" in text
    assert text.startswith("`train.init` needs")


def test_the_others_of_a_sweep():
    """With `hyper`, the optimiser is a function that may close over another array."""
    hyper = {"lr": RATES}
    with pytest.raises(ValueError, match="`fit` needs an optimiser of one member; this one holds `weight_decay`"):
        fit(lambda h: optax.adamw(h["lr"], weight_decay=RATES), hyper=hyper)
    both = hyper | {"weight_decay": RATES}
    assert fit(lambda h: optax.adamw(h["lr"], weight_decay=h["weight_decay"]), hyper=both).status.tolist() == [0] * 4


def test_it_was_silent():
    """What the refused program would have computed: every member with rate `i` in column `i`."""
    optimiser, member = optax.sgd(RATES), WIDE[0]
    params = eqx.filter(member, eqx.is_inexact_array)
    with jax.numpy_rank_promotion("allow"):
        updates, _ = optimiser.update(jax.tree.map(jnp.ones_like, params), optimiser.init(params))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(updates.layers[0].weight[0], -RATES)


class Vector(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


def of_labels(tree):
    return jax.tree.map(lambda x: "a" if x.ndim == 1 else "b", tree)


RIGHT = {
    "a number": lambda: optax.sgd(0.1),
    "an array of one number": lambda: optax.sgd(jnp.array(0.1)),
    "another count": lambda: optax.sgd(RATES[:1]),
    "a schedule with arrays": lambda: optax.sgd(lambda step: RATES[step % 4]),
    "a schedule of optax": lambda: optax.sgd(
        optax.piecewise_interpolate_schedule("linear", 0.1, {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5})
    ),
    "joined schedules": lambda: optax.adam(optax.join_schedules([optax.constant_schedule(0.1)] * 5, [1, 2, 3, 4])),
    "a mask": lambda: optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "labels": lambda: optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, of_labels),
    "rates of the numbers of biases": lambda: optax.masked(
        optax.sgd(RATES), lambda tree: jax.tree.map(lambda x: x.ndim == 1, tree)
    ),
    "rates of the numbers of biases, by labels": lambda: optax.multi_transform(
        {"a": optax.sgd(RATES), "b": optax.sgd(0.1)}, of_labels
    ),
    "an own transformation": lambda: optax.chain(own(RATES), optax.sgd(0.1)),
    "rates of a tree": lambda: optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * RATES, updates)), optax.sgd(0.1)
    ),
}


def own(step_size):
    """A transformation of the user, whose array is the user's business."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(lambda u: u * step_size, updates), state),
    )


@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_pass(case):
    with jax.numpy_rank_promotion("allow"):
        assert fit(RIGHT[case]()).status.tolist() == [0] * 4


def test_one_rate_for_each_weight():
    """A member that is one vector may have a rate for each of its numbers, however many members there are."""
    ensemble = ee.build(lambda key: Vector(jax.random.normal(key, (4,))), 4, key=KEY)
    got = fit(optax.sgd(RATES), ensemble).ensemble
    member, _, _ = ee.fit(ensemble[[2]], loss, optax.sgd(RATES), DATA, steps=2, key=KEY).ensemble.unstack() * 3
    np.testing.assert_allclose(got[2].weight, member.weight, rtol=1e-6)


def test_another_number_of_members_is_not_meant():
    """Four rates for three members."""
    ensemble = ee.build(lambda key: eqx.nn.Linear(4, 4, use_bias=False, key=key), 3, key=KEY)
    with jax.numpy_rank_promotion("allow"):
        assert fit(optax.sgd(RATES), ensemble).status.tolist() == [0] * 3


def test_one_member_has_one_rate():
    with jax.numpy_rank_promotion("allow"):
        assert fit(optax.sgd(RATES[:1]), WIDE[:1]).status.tolist() == [0]
