"""Weight matching: permuted copies are recovered exactly, and members remain the functions that they are."""

from itertools import permutations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.alignment import Units, align, find_units

KEY = jax.random.key(3)
FLOAT = jnp.result_type(float)


def rng(seed=0):
    return np.random.default_rng(seed)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def noisy(model, scale=1.0, seed=0):
    """The model with noise on all weights, so that no bias or scale is that of its initialisation."""
    draws = rng(seed)
    noise = lambda x: x + scale * jnp.asarray(draws.normal(size=x.shape), x.dtype) * (jnp.std(x) + 0.1)
    return jax.tree.map(lambda x: noise(x) if eqx.is_inexact_array(x) else x, model)


def mlp(key, width=32):
    return eqx.nn.MLP(4, 2, width, 2, key=key)


def permuted_mlp(model, orders):
    """The same function with its hidden units in other orders, written out."""
    first, second = orders
    a, b, c = model.layers
    new = (a.weight[first], a.bias[first], b.weight[second][:, first], b.bias[second], c.weight[:, second])
    where = lambda m: (
        m.layers[0].weight, m.layers[0].bias, m.layers[1].weight, m.layers[1].bias, m.layers[2].weight,
    )  # fmt: skip
    return eqx.tree_at(where, model, new)


def two_orders(width):
    return rng(1).permutation(width), rng(2).permutation(width)


@pytest.fixture(scope="module")
def twins():
    """A model and its copy with permuted units, and rows."""
    model = noisy(mlp(KEY))
    return ee.stack([model, permuted_mlp(model, two_orders(32))]), rng(5).normal(size=(40, 4)).astype(FLOAT)


def test_a_permuted_copy_is_recovered_exactly(twins):
    ensemble, x = twins
    aligned = align(ensemble, x, key=KEY)
    for stacked in arrays(aligned.stacked):
        np.testing.assert_array_equal(stacked[0], stacked[1])
    assert any((stacked[0] != stacked[1]).any() for stacked in arrays(ensemble.stacked)), "the case decides nothing"
    assert eqx.tree_equal(aligned[0], ensemble[0])
    assert eqx.tree_equal(align(ensemble, x, reference=-1, key=KEY)[0], ensemble[1])


@pytest.mark.parametrize("seed", range(2))
def test_noise_on_the_copy_does_not_hide_the_order(twins, seed):
    ensemble, x = twins
    model, other = ensemble[0], noisy(ensemble[0], 0.3, seed=1 + seed)
    aligned = align(ee.stack([model, permuted_mlp(other, two_orders(32))]), x, key=jax.random.key(seed))
    assert eqx.tree_equal(aligned[1], other)


def test_the_average_with_a_permuted_copy_is_the_model_after_alignment(twins):
    ensemble, x = twins
    y = jax.vmap(ensemble[0])(x)
    mse = lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    aligned = align(ensemble, x, key=KEY)
    assert mse(ee.average_parameters(aligned)) < 1e-11 < 0.1 < mse(ee.average_parameters(ensemble))


@pytest.mark.slow
def test_functions_remain_the_same_to_rounding():
    with jax.enable_x64(True):
        ensemble = ee.build(lambda key: mlp(key, 16), 3, key=KEY)
        x = rng(5).normal(size=(40, 4))
        aligned = align(ensemble, x, key=KEY)
        before, after = ee.predict(ensemble, x), ee.predict(aligned, x)
    assert before.dtype == np.float64
    assert 0 < np.abs(before - after).max() < 5e-15
    similarity = lambda e: sum(np.vdot(stacked[0], stacked[2]) for stacked in arrays(e.stacked))
    assert similarity(aligned) > similarity(ensemble) + 0.5


def test_one_group_is_the_best_of_all_orders():
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 5, 1, key=key), 2, key=KEY)
    a, b = (list(map(np.asarray, (m.layers[0].weight, m.layers[0].bias, m.layers[1].weight))) for m in ensemble)
    inner = lambda p: sum((u * v).sum() for u, v in zip(a, (b[0][p], b[1][p], b[2][:, p]), strict=True))
    values = {p: inner(list(p)) for p in permutations(range(5))}
    best = list(max(values, key=values.__getitem__))
    assert best != [0, 1, 2, 3, 4], "the case decides nothing"
    aligned = align(ensemble, rng(5).normal(size=(4, 3)).astype(FLOAT), key=KEY)
    np.testing.assert_array_equal(aligned[1].layers[0].weight, b[0][best])


def attention(key, num_heads=2, size=4, seed=0):
    biases = dict(use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True)
    layer = eqx.nn.MultiheadAttention(num_heads, size, qk_size=2, vo_size=2, **biases, key=key)
    return noisy(layer, seed=seed)


def permuted_heads(layer, heads):
    own = np.concatenate([2 * head + np.arange(2) for head in heads])
    where = lambda m: (
        m.query_proj.weight, m.query_proj.bias, m.key_proj.weight, m.key_proj.bias, m.value_proj.weight,
        m.value_proj.bias, m.output_proj.weight,
    )  # fmt: skip
    q1, q2, k1, k2, v1, v2, o = where(layer)
    return eqx.tree_at(where, layer, (q1[own], q2[own], k1[own], k2[own], v1[own], v2[own], o[:, own]))


def attend(layer, x):
    return layer(x, x, x)


def test_heads_are_in_the_best_of_all_orders():
    a, b = (attention(key, seed=seed) for seed, key in zip((0, 2), jax.random.split(KEY), strict=True))
    x = rng(5).normal(size=(3, 5, 4)).astype(FLOAT)
    aligned = align(ee.stack([a, b]), x, fn=attend, key=KEY)
    inner = lambda m: sum((u * v).sum() for u, v in zip(arrays(a), arrays(m), strict=True))
    swapped = permuted_heads(b, (1, 0))
    assert eqx.tree_equal(aligned[1], swapped)
    assert inner(swapped) > inner(b), "the case does not decide"


class Block(eqx.Module):
    """A residual stream: an embedding and two layers write to it, norms, a gate and three layers read it."""

    embed: eqx.nn.Linear
    gate: jax.Array
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    out: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.embed, self.gate = eqx.nn.Linear(3, 6, key=a), jnp.ones(6)
        self.norm, self.attention = eqx.nn.LayerNorm(6), attention(b, size=6)
        self.mlp, self.out = eqx.nn.MLP(6, 6, 8, 1, key=c), eqx.nn.Linear(6, 2, key=d)

    def __call__(self, x):
        h = jax.vmap(self.embed)(x) * self.gate[None]
        h = h + attend(self.attention, jax.vmap(self.norm)(h))
        return jax.vmap(self.out)(h + jax.vmap(self.mlp)(h))


STREAM = Units(
    [lambda m: m.embed, (lambda m: m.gate, 0), lambda m: m.norm, lambda m: m.attention, lambda m: m.mlp],
    inputs=[lambda m: m.attention, lambda m: m.mlp, lambda m: m.out],
)


def permuted_stream(model, p):
    layers = lambda m: (m.embed.weight, m.embed.bias, m.gate, m.norm.weight, m.norm.bias)
    model = eqx.tree_at(layers, model, [x[p] for x in layers(model)])
    writes = lambda m: (
        m.attention.output_proj.weight, m.attention.output_proj.bias, m.mlp.layers[1].weight, m.mlp.layers[1].bias,
    )  # fmt: skip
    model = eqx.tree_at(writes, model, [x[p] for x in writes(model)])
    reads = lambda m: (
        m.attention.query_proj.weight, m.attention.key_proj.weight, m.attention.value_proj.weight,
        m.mlp.layers[0].weight, m.out.weight,
    )  # fmt: skip
    return eqx.tree_at(reads, model, [x[:, p] for x in reads(model)])


@pytest.fixture(scope="module")
def blocks():
    model = noisy(Block(KEY))
    other = eqx.tree_at(lambda m: m.attention, model, permuted_heads(model.attention, (1, 0)))
    hidden = rng(5).permutation(8)
    where = lambda m: (m.mlp.layers[0].weight, m.mlp.layers[0].bias, m.mlp.layers[1].weight)
    first, bias, second = where(other)
    other = eqx.tree_at(where, other, (first[hidden], bias[hidden], second[:, hidden]))
    return ee.stack([model, permuted_stream(other, rng(5).permutation(6))]), rng(5).normal(size=(4, 5, 3)).astype(FLOAT)


def test_a_residual_stream_shares_one_order(blocks):
    ensemble, x = blocks
    units = [*find_units(ensemble), STREAM]
    assert len(units) == 3
    aligned = align(ensemble, x, units=units, key=KEY)
    assert eqx.tree_equal(aligned[0], aligned[1])
    assert not eqx.tree_equal(align(ensemble, x, key=KEY)[1], aligned[1]), "the stream was not needed"


@pytest.mark.parametrize(
    ("missing", "kept"),
    [
        ("norm", Units([e for i, e in enumerate(STREAM.outputs) if i != 2], STREAM.inputs)),
        ("gate", Units([e for i, e in enumerate(STREAM.outputs) if i != 1], STREAM.inputs)),
        ("reader", Units(STREAM.outputs, STREAM.inputs[:2])),
    ],
)
def test_units_that_were_declared_wrongly_are_named(blocks, missing, kept):
    ensemble, x = blocks
    with pytest.raises(ValueError, match=r"shuffling them changed.*: units\[1\]: `.embed.weight` axis 0.*\nName") as e:
        align(ensemble, x, units=[find_units(ensemble)[0], kept], key=KEY)
    assert "units[0]" not in str(e.value)


def test_units_are_seen_to_be_wrong_however_few():
    """Of two units half of all random orders are the old one."""
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 2, 1, activation=jnp.tanh, key=key), 1, key=KEY)
    wrong = [Units([lambda m: m.layers[0]])]
    for seed in range(5):
        with pytest.raises(ValueError, match="shuffling them changed"):
            align(ensemble, np.ones((2, 3), FLOAT), units=wrong, key=jax.random.key(seed))


class ConvNet(eqx.Module):
    layers: eqx.nn.Sequential

    def __init__(self, key, mode="batch"):
        a, b, c, d = jax.random.split(key, 4)
        self.layers = eqx.nn.Sequential([
            eqx.nn.Conv2d(2, 6, 3, key=a), eqx.nn.BatchNorm(6, "batch", mode=mode), eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(6, 6, 2, groups=6, key=b), eqx.nn.GroupNorm(1, 6), eqx.nn.ConvTranspose2d(6, 4, 2, key=c),
            eqx.nn.Lambda(jnp.tanh), eqx.nn.MaxPool2d(2, 2), eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(16, 3, key=d),
        ])  # fmt: skip

    def __call__(self, x, state):
        return self.layers(x, state)


def permuted_conv(model, state, p, q):
    layers = model.layers.layers
    flat = (4 * q[:, None] + np.arange(4)).ravel()
    where = lambda m: (
        [m.layers.layers[i].weight for i in (0, 1, 3, 4)] + [m.layers.layers[i].bias for i in (0, 1, 3, 4)]
    )
    model = eqx.tree_at(where, model, [x[p] for x in where(model)])
    rest = lambda m: (m.layers.layers[5].weight, m.layers.layers[5].bias, m.layers.layers[9].weight)
    weight, bias, last = rest(model)
    model = eqx.tree_at(rest, model, (weight[q][:, p], bias[q], last[:, flat]))
    index = layers[1].batch_state_index or layers[1].ema_state_index
    new = jax.tree.map(lambda x: x, state)
    return model, new.set(index, jax.tree.map(lambda x: x[p], state.get(index)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_channels_take_their_norms_and_statistics_along(mode):
    model, state = eqx.nn.make_with_state(ConvNet)(KEY, mode)
    model = noisy(model)
    x = rng(5).normal(size=(6, 2, 6, 6)).astype(FLOAT)
    train = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    state = train(jnp.asarray(x), state)[1]
    twin, twin_state = permuted_conv(model, state, rng(1).permutation(6), rng(2).permutation(4))
    ensemble, states = ee.stack([model, twin]), ee.tree.stack([state, twin_state])
    assert len(find_units(ensemble)) == 2
    aligned, moved = align(ensemble, x, state=states, key=KEY)
    assert eqx.tree_equal(aligned[0], aligned[1])
    for before, after in zip(arrays(states), arrays(moved), strict=True):
        np.testing.assert_array_equal(after, np.stack([before[0], before[0]]))
    assert eqx.tree_equal(ee.tree.stack([state, twin_state]), states), "the given state is still there"
    if mode == "batch":
        entries = [lambda m, i=i: m.layers.layers[i] for i in (0, 3, 4)]
        with pytest.raises(ValueError, match="shuffling them changed"):  # without BatchNorm
            align(ensemble, x, state=states, units=[Units(entries, [lambda m: m.layers.layers[5]])], key=KEY)


def test_statistics_of_several_entries_for_each_unit():
    """A BatchNorm behind channels that were flattened."""

    def make(key):
        conv, linear = eqx.nn.Conv1d(1, 6, 1, key=key), eqx.nn.Linear(12, 1, key=key)
        norm = lambda: eqx.nn.BatchNorm(12, "batch", channelwise_affine=False, mode="batch")
        layers = lambda: eqx.nn.Sequential([conv, eqx.nn.Lambda(jnp.ravel), norm(), linear])
        return eqx.nn.make_with_state(layers)()

    ensemble, states = ee.build(make, 2, key=KEY)
    draws = rng()
    drawn = lambda x: jnp.asarray(draws.uniform(1, 2, x.shape), x.dtype) if eqx.is_inexact_array(x) else x
    states = jax.tree.map(drawn, states)
    x = draws.normal(size=(3, 1, 2)).astype(FLOAT)
    aligned, moved = align(ensemble, x, state=states, key=KEY)
    before, after = ee.predict(ensemble, x, state=states), ee.predict(aligned, x, state=moved)
    np.testing.assert_allclose(before, after, rtol=1e-5)
    assert any((a != b).any() for a, b in zip(arrays(states), arrays(moved), strict=True)), "nothing moved"


@pytest.mark.slow
def test_members_do_not_depend_on_each_other():
    ensemble = ee.build(lambda key: mlp(key, 8), 4, key=KEY)
    x = rng(5).normal(size=(5, 4)).astype(FLOAT)
    keys = ee.member_keys(KEY, 4, purpose="align")[np.array([0, 3])]
    whole, part = align(ensemble, x, key=KEY), align(ensemble[[0, 3]], x, key=keys)
    assert eqx.tree_equal(whole[3], part[1])
    assert not eqx.tree_equal(whole[3], ensemble[3])


def linear(size, **options):
    return eqx.nn.Linear(size, size, key=KEY, **options)


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        ([linear(4), linear(4)], 1),
        ([linear(4), eqx.nn.Dropout(0.5), linear(4), eqx.nn.LayerNorm(4), linear(4)], 2),
        ([linear(4)], 0),
        ([eqx.nn.Embedding(5, 4, key=KEY), linear(4)], 1),
        ([linear(4), eqx.nn.Sequential([eqx.nn.RMSNorm(4), mlp(KEY, 8)])], 3),
        ([eqx.nn.Conv2d(2, 4, 3, key=KEY), eqx.nn.GroupNorm(2, 4), eqx.nn.Conv2d(4, 2, 3, key=KEY)], 0),
        ([eqx.nn.Conv2d(2, 4, 3, key=KEY), eqx.nn.Conv2d(4, 4, 3, groups=2, key=KEY), linear(4)], 0),
        ([linear(4), eqx.nn.WeightNorm(linear(4)), linear(4)], 0),
        ([eqx.nn.MLP(4, 4, 8, 3, scan=True, key=KEY)], 0),
        ([eqx.nn.MLP(4, 4, 8, 2, activation=eqx.nn.PReLU(), key=KEY)], 0),
        ([eqx.nn.MultiheadAttention(2, 4, key=KEY)], 1),
    ],
)
def test_units_that_are_found(layers, count):
    assert len(find_units({"deep": [eqx.nn.Sequential(layers)]}["deep"][0])) == count


BAD = {
    "no ensemble": ({"ensemble": [1]}, TypeError, "An `Ensemble` is needed"),
    "no units": ({"units": []}, ValueError, "found no units"),
    "a layer without axes": ({"units": [Units([lambda m: m.activation])]}, TypeError, "cannot infer the axes"),
    "sizes that differ": (
        {"units": [Units([lambda m: m.layers[0]], [lambda m: m.layers[0]])]}, ValueError, "each of the 32 units",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(unhooked, twins, name):
    change, error, message = BAD[name]
    ensemble, x = twins
    with pytest.raises(error, match=message):
        align(**({"ensemble": ensemble, "x": x, "key": KEY} | change))


def test_members_that_cannot_be_aligned(unhooked, twins):
    ensemble, x = twins
    broken = eqx.tree_at(lambda e: e.stacked.layers[1].bias, ensemble, replace_fn=lambda b: b.at[1, 3].set(jnp.nan))
    with pytest.raises(ValueError, match=r"`.layers\[1\].bias`: not finite in members \[1\]"):
        align(broken, x, key=KEY)
    shared = ee.stack([ensemble[0]] * 2, shared=lambda m: m.layers[0].weight)
    with pytest.raises(ValueError, match="is shared by all"):
        align(shared, x, key=KEY)
    with pytest.raises(ValueError, match="found no units"):
        align(ee.build(lambda key: eqx.nn.Linear(4, 1, key=key), 2, key=KEY), x, key=KEY)
    with pytest.raises(ValueError, match="finite floating-point"):
        align(ensemble, np.full_like(x, np.nan), key=KEY)
    with pytest.raises(TypeError, match="cannot run inside a transformation"):
        jax.jit(lambda x: align(eqx.combine(x, eqx.filter(ensemble, eqx.is_array, inverse=True)), x, key=KEY))(
            eqx.filter(ensemble, eqx.is_array)
        )
