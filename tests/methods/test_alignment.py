"""Weight matching: permuted copies are recovered exactly, and members remain the functions that they are."""

from itertools import permutations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.alignment import Units, align, find_units

from ..factories import assert_same

KEY = jax.random.key(3)
FLOAT = jnp.result_type(float)
rng = np.random.default_rng


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def noisy(model, scale=1.0, seed=0):
    """The model with noise on all weights, so that no bias or scale is that of its initialisation."""
    draws = rng(seed)
    noise = lambda x: x + scale * jnp.asarray(draws.normal(size=x.shape), x.dtype) * (jnp.std(x) + 0.1)
    return jax.tree.map(lambda x: noise(x) if eqx.is_inexact_array(x) else x, model)


def rows(*shape):
    return rng(5).normal(size=shape).astype(FLOAT)


def mlp(key, width=32):
    return eqx.nn.MLP(4, 2, width, 2, key=key)


def permuted(model, where, order, axis=0):
    """The arrays of a model with an axis in another order."""
    return eqx.tree_at(where, model, [jnp.take(x, order, axis=axis) for x in where(model)])


def permuted_layers(model, number, order):
    """The same function with the hidden units behind a layer of an MLP in another order."""
    model = permuted(model, lambda m: [m.layers[number].weight, m.layers[number].bias], order)
    return permuted(model, lambda m: [m.layers[number + 1].weight], order, axis=1)


@pytest.mark.slow
def test_a_permuted_copy_is_recovered_exactly():
    model, x = noisy(mlp(KEY)), rows(40, 4)
    twin = permuted_layers(permuted_layers(model, 0, rng(1).permutation(32)), 1, rng(2).permutation(32))
    ensemble = ee.stack([model, twin])
    aligned = align(ensemble, x, key=KEY)
    assert_same(aligned[0], ensemble[0])
    assert_same(aligned[1], ensemble[0])
    assert_same(align(ensemble, x, reference=-1, key=KEY)[0], ensemble[1])
    mse = lambda model: jnp.mean((jax.vmap(model)(x) - jax.vmap(ensemble[0])(x)) ** 2)
    assert mse(ee.average_parameters(aligned)) < 1e-11 < 0.1 < mse(ee.average_parameters(ensemble))


@pytest.mark.slow
def test_functions_remain_the_same_to_rounding():
    with jax.enable_x64(True):
        ensemble, x = ee.build(lambda key: mlp(key, 16), 3, key=KEY), rng(5).normal(size=(40, 4))
        aligned = align(ensemble, x, key=KEY)
        assert 0 < np.abs(ee.predict(ensemble, x) - ee.predict(aligned, x)).max() < 5e-15
        keys = ee.member_keys(KEY, 3, purpose="align")[np.array([0, 2])]
        assert_same(align(ensemble[[0, 2]], x, key=keys)[1], aligned[2])  # whatever the other members are


@pytest.mark.slow
def test_one_group_is_the_best_of_all_orders():
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 5, 1, key=key), 2, key=KEY)
    orders = {p: permuted_layers(ensemble[1], 0, np.array(p)) for p in permutations(range(5))}
    inner = lambda p: sum((u * v).sum() for u, v in zip(arrays(ensemble[0]), arrays(orders[p]), strict=True))
    best = max(orders, key=inner)
    assert_same(align(ensemble, rows(4, 3), key=KEY)[1], orders[best])


class Block(eqx.Module):
    """A residual stream: an embedding and a layer write to it, a norm, a gate and two layers read it."""

    embed: eqx.nn.Linear
    gate: jax.Array
    norm: eqx.nn.LayerNorm
    square: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.embed, self.gate, self.norm = eqx.nn.Linear(3, 6, key=a), jnp.ones(6), eqx.nn.LayerNorm(6)
        self.square, self.out = eqx.nn.Linear(6, 6, key=b), eqx.nn.Linear(6, 2, key=c)

    def __call__(self, x):
        h = self.embed(x) * self.gate
        return self.out(h + self.square(self.norm(h)))


STREAM = Units(
    [lambda m: m.embed, (lambda m: m.gate, -1), lambda m: m.norm, lambda m: m.square],
    [lambda m: m.square, lambda m: m.out],
)


@pytest.mark.slow
def test_a_residual_stream_shares_one_order():
    """Of a square layer on both axes. Units that were declared wrongly are named."""
    model, p = noisy(Block(KEY)), rng(5).permutation(6)
    rows_of = lambda m: [m.gate, *(x for layer in (m.embed, m.norm, m.square) for x in (layer.weight, layer.bias))]
    other = permuted(permuted(model, rows_of, p), lambda m: [m.square.weight, m.out.weight], p, axis=1)
    ensemble, x = ee.stack([model, other]), rows(20, 3)
    aligned = align(ensemble, x, units=[STREAM], key=KEY)
    assert_same(aligned[0], aligned[1])
    outputs, inputs = STREAM.outputs, STREAM.inputs
    for wrong in (Units([outputs[0], *outputs[2:]], inputs), Units(outputs, inputs[:1])):
        with pytest.raises(ValueError, match=r"shuffling them changed predictions: those of `.embed.weight`.\nName"):
            align(ensemble, x, units=[wrong], key=KEY)


def convolutions(key, mode="batch"):
    a, b, c, d = jax.random.split(key, 4)
    return eqx.nn.Sequential([
        eqx.nn.Conv2d(2, 6, 3, key=a), eqx.nn.BatchNorm(6, "batch", mode=mode), eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(6, 6, 2, groups=6, key=b), eqx.nn.GroupNorm(1, 6), eqx.nn.ConvTranspose2d(6, 4, 2, key=c),
        eqx.nn.Lambda(jnp.tanh), eqx.nn.MaxPool2d(2, 2), eqx.nn.Lambda(jnp.ravel),
        eqx.nn.BatchNorm(16, "batch", channelwise_affine=False, mode=mode), eqx.nn.Linear(16, 3, key=d),
    ])  # fmt: skip


def permuted_convolutions(model, state, p, q):
    flat = (4 * q[:, None] + np.arange(4)).ravel()
    of = lambda *numbers: lambda m: [x for i in numbers for x in (m.layers[i].weight, m.layers[i].bias)]
    weight = lambda number: lambda m: [m.layers[number].weight]
    model = permuted(permuted(model, of(0, 1, 3, 4), p), weight(5), p, axis=1)
    model = permuted(permuted(model, of(5), q), weight(10), flat, axis=1)
    state = jax.tree.map(lambda x: x, state)
    for norm, order in ((model.layers[1], p), (model.layers[9], flat)):
        index = norm.batch_state_index or norm.ema_state_index
        state = state.set(index, jax.tree.map(lambda x, order=order: x[order], state.get(index)))
    return model, state


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_channels_take_their_norms_and_statistics_along(mode):
    """Also behind a flattening, where each channel has several statistics."""
    model, state = eqx.nn.make_with_state(convolutions)(KEY, mode)
    model, x = noisy(model), rows(6, 2, 6, 6)
    train = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    state = train(jnp.asarray(x), state)[1]
    twin, twin_state = permuted_convolutions(model, state, rng(1).permutation(6), rng(2).permutation(4))
    ensemble, states = ee.stack([model, twin]), ee.tree.stack([state, twin_state])
    aligned, moved = align(ensemble, x, state=states, key=KEY)
    assert_same(aligned[0], aligned[1])
    for before, after in zip(arrays(states), arrays(moved), strict=True):
        np.testing.assert_array_equal(after, np.stack([before[0], before[0]]))
    assert_same(ee.tree.stack([state, twin_state]), states)  # the given state is still there


def test_units_that_are_found():
    linear, conv = (lambda: eqx.nn.Linear(4, 4, key=KEY)), lambda *sizes: eqx.nn.Conv2d(*sizes, 3, key=KEY)
    for layers, count in [
        ([linear(), eqx.nn.Dropout(0.5), linear(), eqx.nn.LayerNorm(4), linear()], 2),
        ([linear(), eqx.nn.Sequential([eqx.nn.RMSNorm(4), mlp(KEY, 8)])], 3),
        ([conv(2, 4), eqx.nn.GroupNorm(2, 4), conv(4, 2)], 0),
        ([linear(), eqx.nn.WeightNorm(linear()), linear()], 0),
        ([eqx.nn.MLP(4, 4, 8, 3, scan=True, key=KEY)], 0),
    ]:
        assert len(find_units({"deep": [jnp.ones(2), eqx.nn.Sequential(layers)]})) == count


@pytest.mark.slow
def test_bad_input(unhooked):
    small = lambda key: eqx.nn.MLP(3, 1, 2, 1, activation=jnp.tanh, key=key)
    ensemble, x = ee.build(small, 2, key=KEY), rows(2, 3)
    cases = [
        ({"units": [Units([lambda m: m.activation])]}, TypeError, "cannot infer the axes"),
        ({"units": [Units([lambda m: m.layers[0]], [lambda m: m.layers[0]])]}, ValueError, "each of 2 units"),
        ({"ensemble": ee.stack([ensemble[0]] * 2, shared=lambda m: m.layers[0].weight)}, ValueError, "shared by all"),
        ({"x": np.full_like(x, np.nan)}, ValueError, r"for members \[0 1\] they are not finite"),
    ]
    wrong = {"ensemble": ensemble[:1], "units": [Units([lambda m: m.layers[0]])]}  # half of all orders are the old one
    cases += [(wrong | {"key": jax.random.key(seed)}, ValueError, "shuffling them changed") for seed in range(5)]
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            align(**({"ensemble": ensemble, "x": x, "key": KEY} | change))
