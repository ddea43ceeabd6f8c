"""Adapters on a frozen base, against the base, hand-written LoRA and full copies; soups of members."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.adapters import bias_only, layers_only, low_rank, merge, scales
from eqx_ensemble.methods.soups import greedy

from ..factories import assert_close, assert_same, data, mse, relaxed
from ..marking import slow_but

KEY = jax.random.key(11)
BASE = eqx.nn.MLP(25, 2, 6, 1, key=jax.random.key(12))
ADAM = optax.adam(1e-2)
FIT = {"steps": 4, "batch_size": 16, "key": KEY}
CONVOLUTIONS = eqx.nn.Sequential([
    eqx.nn.Conv2d(2, 3, 3, padding="SAME", dilation=2, key=KEY), eqx.nn.Lambda(jnp.tanh),
    eqx.nn.Conv2d(3, 4, 2, stride=2, use_bias=False, key=KEY),
])  # fmt: skip
ATTENTION = eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=KEY)
MODELS = {
    "mlp": (BASE, (jnp.linspace(-1, 1, 25),)),
    "convolutions": (CONVOLUTIONS, (jax.random.normal(KEY, (2, 6, 6)),)),
    "attention": (ATTENTION, (jax.random.normal(KEY, (5, 4)),) * 3),
}
ADAPTERS = {
    "low_rank": lambda model: low_rank(model, 3, rank=2, scale=0.5, key=KEY),
    "scales": lambda model: scales(model, 3),
    "bias_only": lambda model: bias_only(model, 3),
}
PAIRS = [("mlp", adapter) for adapter in ADAPTERS]
PAIRS += [(name, "low_rank") for name in list(MODELS)[1:]]
PAIRS += [("convolutions", "scales"), ("attention", "bias_only")]


def own_arrays(ensemble):
    """The arrays that members have of their own, and the rest."""
    return eqx.partition(
        ensemble.stacked, jax.tree.map(lambda axis: axis == 0, ensemble.in_axes().stacked, is_leaf=lambda x: x is None)
    )


def perturb(ensemble):
    """All adapters as after training: with random numbers added."""
    keys = iter(jax.random.split(KEY, 100))
    move = lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape) if eqx.is_inexact_array(x) and x.ndim > 1 else x
    own, rest = own_arrays(ensemble)
    return dataclasses.replace(ensemble, stacked=eqx.combine(jax.tree.map(move, own), rest))


@pytest.mark.parametrize("pair", slow_but(PAIRS[:1], PAIRS))
def test_members_begin_as_the_base_and_merge(pair):
    name, adapter = pair
    base, inputs = MODELS[name]
    ensemble = ADAPTERS[adapter](base)
    expected = base(*inputs)
    np.testing.assert_array_equal(ensemble[1](*inputs), expected)
    np.testing.assert_allclose(ensemble(*inputs), jnp.stack([expected] * 3), rtol=1e-5, atol=1e-6)
    moved = perturb(ensemble)
    assert jnp.abs(moved[1](*inputs) - expected).max() > 1e-3
    merged = merge(moved[1])
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(merged(*inputs), moved[1](*inputs), rtol=1e-5, atol=1e-6)
    copies = ee.map_members(merge)(moved)
    assert_close(copies[1], merged, rtol=1e-6)
    np.testing.assert_allclose(copies(*inputs), moved(*inputs), rtol=1e-5, atol=2e-6)


def by_hand(layers, x):
    """A low-rank member of `BASE`: `layers` are pairs of matrices."""
    for i, (layer, (down, up)) in enumerate(zip(BASE.layers, layers, strict=True)):
        x = layer.weight @ x + 0.5 * (up @ (down @ x)) + layer.bias
        x = jax.nn.relu(x) if i == 0 else x
    return x


@pytest.mark.slow
def test_training_equals_a_hand_written_step():
    """Each member against a loop over its two matrices a layer, in the order of the rows."""
    ensemble = low_rank(BASE, 3, rank=2, scale=0.5, key=KEY)
    x, y = data(48)
    run = ee.fit(ensemble, mse, ADAM, (x, y), steps=6, batch_size=16, shuffle=False, key=KEY)

    loss = lambda layers, x, y: jnp.mean((jax.vmap(by_hand, (None, 0))(layers, x) - y) ** 2)
    gradient = jax.jit(jax.grad(loss))
    for i in range(3):
        layers = [(layer.down, layer.up) for layer in ensemble[i].layers]
        state = ADAM.init(layers)
        for rows in 2 * [slice(0, 16), slice(16, 32), slice(32, 48)]:
            with relaxed():
                updates, state = ADAM.update(gradient(layers, x[rows], y[rows]), state)
            layers = optax.apply_updates(layers, updates)
        assert_close([(layer.down, layer.up) for layer in run.ensemble[i].layers], layers, rtol=1e-5)
    assert_same(own_arrays(run.ensemble)[1], own_arrays(ensemble)[1])


def test_the_base_has_no_gradient_and_is_multiplied_once():
    """A product of the shape of a base weight would be its gradient; full copies form it. Outputs need one product."""

    def products(ensemble):
        own, rest = own_arrays(ensemble)
        of_all = ee.map_members(lambda model: mse(model, data(16), KEY))
        total = lambda own: jnp.sum(of_all(dataclasses.replace(ensemble, stacked=eqx.combine(own, rest))))
        text = str(eqx.filter_make_jaxpr(eqx.filter_grad(total))(own)[0])
        return {tuple(shape.split(",")[-2:]) for shape in re.findall(r"f32\[([\d,]+)\] = dot_general", text)}

    ensemble, weights = low_rank(BASE, 3, rank=1, key=KEY), {("6", "25"), ("25", "6"), ("2", "6"), ("6", "2")}
    assert not products(ensemble) & weights
    assert products(ee.map_members(merge)(ensemble)) & weights
    assert "f32[6,3] = dot_general" in str(jax.make_jaxpr(lambda x: ensemble(ee.Each(x)))(jnp.ones((3, 25))))


def test_members_follow_from_their_keys_and_layers_are_selected():
    every, keys = low_rank(BASE, 7, rank=1, key=KEY), ee.member_keys(KEY, 7, purpose="low_rank")
    assert_same(low_rank(BASE, 2, rank=1, key=keys[np.array([4, 1])]), every[[4, 1]])
    alike = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=KEY), eqx.nn.Linear(4, 4, key=KEY)])
    first, second = low_rank(alike, 2, rank=1, key=KEY).stacked.layers
    assert (np.asarray(first.down) != np.asarray(second.down)).all()
    model = eqx.nn.Sequential([eqx.nn.Lambda(lambda x: x), BASE])
    count = lambda where: len(jax.tree.leaves(own_arrays(low_rank(model, 2, rank=1, where=where, key=KEY))[0]))
    assert (count(eqx.nn.MLP), count(None), count(lambda model: model.layers[1].layers[0])) == (4, 4, 2)


def test_nodes_in_full():
    """Of another layer, and the bias of an adapted one."""
    ensemble = scales(BASE, 3, full=lambda m: (m.layers[-1], m.layers[0].bias))
    layers = ensemble.stacked.layers
    assert (layers[-1].bias.shape, layers[0].bias.shape, layers[0].layer.weight.shape) == ((3, 2), (3, 6), (6, 25))
    run, x = ee.fit(ensemble, mse, optax.sgd(0.1), data(), **FIT), data(1)[0][0]
    biases = np.stack([BASE.layers[0].bias, *run.ensemble.stacked.layers[0].bias])
    assert len(np.unique(biases, axis=0)) == 4
    np.testing.assert_allclose(merge(run.ensemble[0])(x), run.ensemble[0](x), rtol=1e-5, atol=1e-6)


def test_a_base_in_bfloat16_keeps_adapters_in_float32():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, BASE)
    ensemble = low_rank(half, 2, rank=2, key=KEY)
    assert {x.dtype for x in jax.tree.leaves(own_arrays(ensemble)[0])} == {jnp.dtype("float32")}
    assert ensemble(jnp.ones(25, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
def test_last_layers_are_those_of_whole_copies():
    last = layers_only(BASE, 3, where=lambda model: model.layers[-1])
    assert [x.shape for x in jax.tree.leaves(own_arrays(last)[0])] == [(3, 2, 6), (3, 2)]
    flags = eqx.tree_at(lambda m: m.layers[-1], jax.tree.map(lambda _: False, BASE), replace_fn=lambda _: True)
    whole = ee.fit(ee.stack([BASE] * 3), mse, ADAM, data(), trainable=flags, **FIT).ensemble
    assert_close(ee.fit(last, mse, ADAM, data(), **FIT).ensemble[1], whole[1], rtol=1e-5)


def test_invalid_arguments(unhooked):
    small, grouped = low_rank(BASE, 2, rank=1, key=KEY), eqx.nn.Conv1d(2, 2, 1, groups=2, key=KEY)
    for call, error, message in [
        (lambda: scales(small, 2), TypeError, "`methods.adapters.scales` needs one model"),
        (lambda: low_rank(grouped, 3, rank=1, key=KEY), ValueError, "without groups, got `groups=2`"),
        (lambda: bias_only(eqx.nn.Linear(2, 2, use_bias=False, key=KEY), 3), ValueError, "no floating-point array in"),
        (lambda: merge(small), TypeError, r"`map_members\(merge\)\(ensemble\)`"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_one_array_in_two_places_is_copied_where_it_is_selected():
    biases, zeros = lambda model: (model.layers[0].bias, model.layers[1].bias), jnp.zeros(6)
    base = eqx.tree_at(biases, eqx.nn.MLP(6, 6, 6, 1, key=KEY), (zeros, zeros))
    where = lambda model: model.layers[1]
    for ensemble in (
        layers_only(base, 2, where=where),
        low_rank(base, 2, rank=1, full=where, key=KEY),
        bias_only(base, 2, where=where),
    ):
        assert [bias.shape for bias in biases(ensemble.stacked)] == [(6,), (2, 6)]


# Greedy soups: the rule written again in NumPy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = (X @ np.ones(4) + RNG.normal(size=50)).astype(np.float32)
WEIGHTS = (1 + 0.5 * RNG.normal(size=(6, 4))).astype(np.float32)


def of_weights(weights):
    make = lambda key: eqx.nn.Linear(4, 1, use_bias=False, key=key)
    ensemble = ee.build(make, len(weights), key=KEY)
    return eqx.tree_at(lambda e: e.stacked.weight, ensemble, jnp.asarray(weights)[:, None, :])


def score(model):
    return jnp.mean((jax.vmap(model)(X)[:, 0] - Y) ** 2)


def soup_by_hand(weights):
    """The members that a soup has, in the order in which they are added."""
    error = lambda w: np.mean((X.astype(np.float64) @ w - Y) ** 2)
    chosen, best = [], np.inf
    for member in sorted(range(len(weights)), key=lambda i: error(weights[i].astype(np.float64))):
        found = error(np.mean(weights[[*chosen, member]].astype(np.float64), axis=0))
        if found <= best:
            chosen, best = [*chosen, member], found
    return chosen, best


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_the_rule_of_soups(mode, sign):
    """In any order of the members, of which the average of all is worse."""
    make = lambda weights: greedy(of_weights(weights), lambda model: sign * score(model), mode=mode)
    soup, (chosen, best) = make(WEIGHTS), soup_by_hand(WEIGHTS)
    assert 1 < len(chosen) < 6, "the case decides nothing"
    np.testing.assert_allclose(soup.weights, np.isin(np.arange(6), chosen) / len(chosen))
    np.testing.assert_allclose(soup.model.weight[0], WEIGHTS[chosen].mean(0), rtol=1e-6)
    np.testing.assert_allclose(soup.score, sign * best, rtol=1e-5)
    np.testing.assert_allclose(soup.member_scores, [sign * score(m) for m in of_weights(WEIGHTS).unstack()])
    order = np.array([4, 2, 0, 5, 1, 3])
    np.testing.assert_array_equal(make(WEIGHTS[order]).weights, soup.weights[order])
    assert make(np.repeat(WEIGHTS[:1], 2, axis=0)).weights.tolist() == [0.5, 0.5]  # ties


def test_adapters_are_averaged_merged():
    """The product of averaged matrices is not the average of the products."""
    ensemble = low_rank(eqx.nn.Linear(4, 2, key=KEY), 3, rank=1, key=KEY)
    own = lambda e: [getattr(e.stacked, name) for name in e.stacked.own]
    ensemble = eqx.tree_at(own, ensemble, replace_fn=lambda x: x + jax.random.normal(KEY, x.shape))
    average = ee.average_parameters(ensemble, [1, 2, 1])
    want = ee.average_parameters(ee.map_members(merge)(ensemble), [1, 2, 1])
    np.testing.assert_allclose(average.weight, want.weight, rtol=1e-6)
    soup = greedy(ensemble, lambda model: jnp.sum(model(X[0])), mode="min")
    np.testing.assert_allclose(soup.model.weight, ee.average_parameters(ensemble, soup.weights).weight, rtol=1e-6)


def test_members_without_a_score_are_left_out(unhooked):
    weights = WEIGHTS.copy()
    weights[soup_by_hand(WEIGHTS)[0][0]] = np.nan
    soup = greedy(of_weights(weights), score, mode="min")
    assert np.isfinite([soup.score, *soup.model.weight[0]]).all()
    with pytest.raises(ValueError, match="for at least one member; all are NaN"):
        greedy(of_weights(weights), lambda model: np.nan, mode="max")
