"""Building and using ensembles: every operation on all members equals a Python loop over `unstack()`."""

import copy
import functools as ft
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import eqx_ensemble as ee

from .factories import CASES, assert_close, assert_same, data, numbers
from .marking import slow_but

KEY = jax.random.key(5)

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def linear(key):
    return eqx.nn.Linear(3, 2, key=key)


def mlp(key):
    return eqx.nn.MLP(3, 2, 4, 1, key=key)


class Branching(eqx.Module):
    """A trunk for all members, a head for each."""

    trunk: eqx.nn.Linear
    head: eqx.nn.MLP

    def __init__(self, key, activation=jax.nn.relu):
        k1, k2 = jax.random.split(key)
        self.trunk = eqx.nn.Linear(3, 4, key=k1)
        self.head = eqx.nn.MLP(4, 2, 4, 1, activation=activation, key=k2)

    def __call__(self, x):
        return self.head(jnp.tanh(self.trunk(x)))


class Noisy(eqx.Module):
    dropout: eqx.nn.Dropout
    width: jax.Array

    def __call__(self, x, *, key):
        return self.dropout(x, key=key) * self.width


def noisy(key, p, width):
    return Noisy(eqx.nn.Dropout(p), width)


def at_half(key, width):
    return noisy(key, 0.5, width)


def trunk(model):
    return model.trunk


@eqx.filter_jit
def call(model, *args):
    return model(*args)


@eqx.filter_jit
def call_batch(model, xs):
    return jax.vmap(model)(xs)


def every(ensemble, x):
    """The reference: the members called one after another."""
    return jnp.stack([call(model, x) for model in ensemble.unstack()])


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(mlp, 4, key=KEY)


@pytest.fixture(scope="module")
def branching():
    return ee.build(Branching, 4, shared=trunk, key=KEY)


@pytest.fixture(scope="module")
def nested():
    return ee.build(lambda key: ee.build(mlp, 3, key=key), 4, key=KEY)


# Building


@pytest.mark.slow
@cases
def test_a_member_is_bit_for_bit_the_model_made_alone(case):
    ensemble, states, alone = built(case)
    for i, made in enumerate(alone):
        assert_same(ensemble[i], made[0] if case.stateful else made)
        if case.stateful:
            assert_same(ee.tree.take(states, i), made[1])


@ft.cache
def built(case):
    """Three members with their state, and what `make` gives for each alone."""
    made = ee.build(case.make, 3, key=KEY)
    alone = [case.make(key) for key in ee.member_keys(KEY, 3)]
    return (*made, alone) if case.stateful else (made, None, alone)


def test_other_keys_make_other_members():
    weights = jnp.concatenate([ee.build(linear, 3, key=jax.random.key(seed)).stacked.weight for seed in (5, 6)])
    assert len(np.unique(weights, axis=0)) == 6


@pytest.mark.slow
def test_growing_changes_no_old_member():
    old, new, all_at_once = (
        ee.build(linear, key=ee.member_keys(KEY, 12)[cut]) for cut in (slice(8), slice(8, 12), slice(12))
    )
    grown = ee.concatenate([old, new])
    assert_same(grown, all_at_once)
    assert_same(grown[:8], old)
    assert_same(ee.build(linear, 12, key=KEY), all_at_once)


def test_keys_of_ones_own():
    keys = jax.random.split(KEY, 3)
    made = ee.build(linear, key=keys)
    for i, key in enumerate(keys):
        assert_same(made[i], linear(key))
    assert_same(ee.build(linear, key=jax.random.key_data(keys)), made)


def test_zip_gives_each_member_its_own_arguments():
    made = ee.build(at_half, zip={"width": np.arange(6.0, dtype=np.float32).reshape(3, 2)}, key=KEY)
    assert len(made) == 3
    for i in range(3):
        assert_same(made[i], Noisy(eqx.nn.Dropout(0.5), jnp.array([2.0 * i, 2.0 * i + 1])))


def test_product_is_that_of_itertools():
    shifts, widths = [0.1, 0.2, 0.5], [1.0, 2.0]
    make = lambda key, shift, width: noisy(key, 0.5, 10 * shift + width)
    made = ee.build(make, product={"shift": shifts, "width": widths}, key=KEY)
    for model, (shift, width) in zip(made, itertools.product(shifts, widths), strict=True):
        close(model.width, 10 * shift + width)


def test_arguments_are_passed_with_the_key_of_the_member():
    def scaled(key, scale):
        return eqx.tree_at(lambda m: m.weight, linear(key), linear(key).weight * scale)

    made = ee.build(scaled, zip={"scale": [1.0, 2.0]}, key=KEY)
    for i, key in enumerate(ee.member_keys(KEY, 2)):
        assert_same(made[i], scaled(key, jnp.asarray(1.0 + i)))


@pytest.mark.slow
def test_stateful_members():
    case = CASES["conv and batch norm"]
    ensemble, state, _ = built(case)
    assert isinstance(state, eqx.nn.State)
    x, y = data(rows=3)  # as many rows as members
    values, states = eqx.filter_jit(ee.map_members(case.loss))(ensemble, state, (x, y), KEY)
    own = ee.tree.unstack(state)
    for i, model in enumerate(ensemble):
        value, after = eqx.filter_jit(case.loss)(model, own[i], (x, y), KEY)
        close(values[i], value)
        assert_close(ee.tree.take(states, i), after, 1e-5)


# From models that exist


@pytest.mark.slow
@cases
def test_stack_and_unstack_are_inverse(case):
    models = [made[0] if case.stateful else made for made in built(case)[2]]
    ensemble = ee.stack(models)
    for got, model, alone in zip(ensemble.unstack(), ensemble, models, strict=True):
        assert_same(got, alone)
        assert_same(model, alone)
        assert type(got) is type(alone)


@pytest.mark.parametrize("name", slow_but(["mlp", "conv and batch norm"], CASES))
def test_map_is_a_loop_over_the_members(name):
    case = CASES[name]
    ensemble, state, _ = built(case)
    loss = eqx.filter_jit(case.loss)
    batch = data(rows=3)
    if case.stateful:
        got = eqx.filter_jit(ee.map_members(case.loss))(ensemble, state, batch, KEY)[0]
        loop = [loss(m, s, batch, KEY)[0] for m, s in zip(ensemble, ee.tree.unstack(state), strict=True)]
    else:
        keys = ee.member_keys(KEY, 3)
        got = eqx.filter_jit(ee.map_members(case.loss))(ensemble, batch, ee.Each(keys))
        loop = [loss(m, batch, key) for m, key in zip(ensemble, keys, strict=True)]
    np.testing.assert_allclose(got, jnp.stack(loop), rtol=max(case.rtol, 1e-5))


def test_from_stacked_holds_what_filter_vmap_makes(ensemble):
    stacked = eqx.filter_vmap(mlp)(ee.member_keys(KEY, 4))
    assert_same(ee.from_stacked(stacked), ensemble)


@pytest.mark.usefixtures("unhooked")
def test_stack_refuses_models_that_differ():
    with pytest.raises(
        ee.MemberMismatchError, match=r"member 1 differs(.|\n)*at `\.weight`: expected f32\[2,3\], got f32\[4,3\]"
    ):
        ee.stack([linear(KEY), eqx.nn.Linear(3, 4, key=KEY)])
    with pytest.raises(ee.MemberMismatchError, match="activation"):
        ee.stack([Branching(KEY), Branching(KEY, jnp.tanh)])
    with pytest.raises(TypeError, match="sequence"):
        ee.stack(linear(KEY))


def test_stack_refuses_pairs_of_model_and_state():
    pairs = [CASES["conv and batch norm"].make(key) for key in jax.random.split(KEY, 2)]
    with pytest.raises(TypeError, match=r"`stack` needs models without their states(.|\n)*tree.stack"):
        ee.stack(pairs)
    assert ee.stack([model for model, _ in pairs]).num_members == 2


def test_scalars_that_differ():
    rates = [eqx.nn.Dropout(0.25), eqx.nn.Dropout(0.5)]
    with pytest.raises(ee.MemberMismatchError, match="promote_scalars"):
        ee.stack(rates)
    promoted = ee.stack(rates, promote_scalars=True)
    assert [float(model.p) for model in promoted] == [0.25, 0.5]


# Calling: shared inputs, `Each` and `Batch`, where every axis has the length of the ensemble


SQUARE = jax.random.normal(jax.random.key(8), (4, 4, 3))


@pytest.mark.slow
def test_shared_each_and_batch_are_never_confused(ensemble):
    vector, matrix = SQUARE[0, 0], SQUARE[0]
    models = ensemble.unstack()
    close(ensemble(vector), every(ensemble, vector))
    close(ensemble(ee.Each(matrix)), jnp.stack([call(model, x) for model, x in zip(models, matrix, strict=True)]))
    close(ensemble(ee.Batch(matrix)), jnp.stack([call_batch(model, matrix) for model in models]))
    own_batches = jnp.stack([call_batch(model, xs) for model, xs in zip(models, SQUARE, strict=True)])
    close(ensemble(ee.Each(ee.Batch(SQUARE))), own_batches)
    close(ensemble(ee.Batch(ee.Each(SQUARE))), own_batches)
    close(ensemble(ee.Each(ee.Batch(jnp.swapaxes(SQUARE, 0, 1)), axis=1)), own_batches)
    close(ensemble(ee.Each(ee.Batch(jnp.swapaxes(SQUARE, 1, 2), axis=1))), own_batches)
    assert ensemble(vector).shape == ensemble(ee.Each(matrix)).shape == (4, 2)
    assert not np.allclose(ensemble(ee.Each(matrix)), ensemble(vector))
    assert not np.allclose(own_batches, ensemble(ee.Batch(matrix)))


def test_an_unmarked_matrix_is_one_example():
    sums = ee.stack([Scaled(jnp.asarray(float(i))) for i in range(4)])
    x = jnp.ones((4, 4))
    close(sums(x), jnp.arange(4.0)[:, None] * 4 * jnp.ones((4, 4)))
    close(sums(ee.Each(x)), jnp.arange(4.0) * 4)
    close(sums(ee.Batch(x)), jnp.arange(4.0)[:, None] * 4 * jnp.ones((4, 4)))


class Scaled(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        return self.scale * jnp.sum(x, axis=0)


@pytest.mark.slow
def test_marks_at_any_depth(ensemble):
    def residual(model, batch, *, weight):
        return weight * (model(batch["x"]) - batch["y"])

    batch = {"x": ee.Each(SQUARE[0]), "y": jnp.ones(2)}
    got = ee.map_members(residual)(ensemble, batch, weight=ee.Each(jnp.arange(4.0)))
    loop = [residual(model, {"x": SQUARE[0, i], "y": jnp.ones(2)}, weight=1.0 * i) for i, model in enumerate(ensemble)]
    close(got, jnp.stack(loop))


# Indexing


INDICES = {
    "int": 2,
    "negative": -1,
    "numpy integer": np.int64(1),
    "jax integer": jnp.int32(3),
    "slice": slice(1, 3),
    "negative step": slice(None, None, -2),
    "list": [2, 0],
    "negative list": [-1, 1],
    "numpy array": np.array([3, 0, 1]),
    "jax array": jnp.array([1, 2]),
    "mask": [True, False, False, True],
    "numpy mask": np.array([False, True, True, False]),
    "jax mask": jnp.array([False, False, True, False]),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_indexing_is_that_of_the_list_of_members(ensemble, index):
    expected = np.arange(4)[np.asarray(index) if not isinstance(index, slice) else index]
    got = ensemble[index]
    models = ensemble.unstack()
    if expected.ndim == 0:
        assert type(got) is eqx.nn.MLP
        assert_same(got, models[expected])
    else:
        assert isinstance(got, ee.Ensemble)
        assert_same(got.unstack(), [models[i] for i in expected])
        close(got(SQUARE[0, 0]), every(ensemble, SQUARE[0, 0])[expected])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "index 4 is out of bounds"),
        (-5, IndexError, "index -5 is out of bounds"),
        ([0, 9], IndexError, "index 9"),
        ([True, False], IndexError, "boolean index did not match"),
        ([], ValueError, "at least one"),
        (slice(4, None), ValueError, "at least one"),
        (True, TypeError, "Use the position"),
        ("a", IndexError, "Use the position"),
        (0.5, IndexError, "Use the position"),
        (None, TypeError, "Use the position"),
        (np.zeros((2, 2), int), TypeError, "of one axis"),
    ],
)
def test_wrong_indices(ensemble, index, error, message):
    with pytest.raises(error, match=message):
        ensemble[index]


def test_traced_indices(ensemble):
    @eqx.filter_jit
    def one(ensemble, i):
        return ensemble[i](SQUARE[0, 0])

    @eqx.filter_jit
    def some(ensemble, rows):
        return ensemble[rows](SQUARE[0, 0])

    expected = every(ensemble, SQUARE[0, 0])
    for i in (0, 3):
        close(one(ensemble, jnp.asarray(i)), expected[i])
    got = some(ensemble, jnp.array([3, 1]))
    close(got, expected[jnp.array([3, 1])])


def test_iteration_and_length(ensemble):
    assert len(ensemble) == ensemble.num_members == 4
    assert [type(model) for model in ensemble] == [eqx.nn.MLP] * 4
    assert_same(list(ensemble), ensemble.unstack())
    first, *rest = ensemble
    assert_same(first, ensemble[0])
    assert len(rest) == 3
    assert len(ensemble[:1]) == 1


# What all members share


@pytest.mark.slow
def test_shared_leaves_are_kept_once_and_un_stacked(branching):
    alone = Branching(ee.member_keys(KEY, 4)[0])
    assert_same(branching.stacked.trunk, alone.trunk)
    for part in (branching[1:], branching[[3, 0]], ee.concatenate([branching[:1], branching[2:]])):
        assert_same(part.stacked.trunk, alone.trunk)
        assert numbers(part.stacked)[".head.layers[0].weight"].shape == (len(part), 4, 4)
    for i, model in enumerate(branching):
        assert_same(model.trunk, alone.trunk)
        assert_same(model.head, Branching(ee.member_keys(KEY, 4)[i]).head)
        assert_same(branching[i], model)
    close(branching(SQUARE[0, 0]), every(branching, SQUARE[0, 0]))
    shapes = ee.map_members(lambda model: (model.trunk.weight, model.head.layers[0].weight))(branching)
    assert [x.shape for x in shapes] == [(4, 3), (4, 4, 4)]


@pytest.mark.slow
def test_stack_with_shared_leaves(branching):
    assert_same(ee.stack(branching.unstack(), shared=trunk), branching)
    assert_same(ee.from_stacked(branching.stacked, shared=trunk), branching)
    with pytest.raises(ee.MemberMismatchError, match=r"`.*\.trunk\.weight` differ"):
        ee.stack(ee.build(Branching, 2, key=KEY).unstack(), shared=trunk)


@pytest.mark.slow
def test_several_shared_nodes():
    ensemble = ee.build(Branching, 3, shared=lambda m: (m.trunk.weight, m.head.layers[1]), key=KEY)
    assert ensemble.stacked.trunk.weight.shape == (4, 3)
    assert ensemble.stacked.head.layers[1].weight.shape == (2, 4)
    close(ensemble(SQUARE[0, 0]), every(ensemble, SQUARE[0, 0]))


# Ensembles from ensembles


@pytest.mark.slow
@pytest.mark.usefixtures("unhooked")
def test_concatenate_refuses_what_does_not_fit(ensemble, branching):
    wider = ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 1, key=KEY)
    with pytest.raises(ee.MemberMismatchError, match=r"layers\[0\]\.weight"):
        ee.concatenate([ensemble, wider])
    with pytest.raises(TypeError, match="all of one kind"):
        ee.concatenate([ensemble, ensemble[0]])
    with pytest.raises(ValueError, match="at least one"):
        ee.concatenate([])
    other_trunk = ee.build(Branching, 1, shared=trunk, key=jax.random.key(1))
    with pytest.raises(ee.MemberMismatchError, match=r"`.*\.trunk\.weight` differ"):
        ee.concatenate([branching, other_trunk])
    no_trunk = ee.build(Branching, 1, key=KEY)
    for pair in ([branching, no_trunk], [no_trunk, branching]):
        with pytest.raises(ee.MemberMismatchError, match=r"\.trunk\.weight"):
            ee.concatenate(pair)


@pytest.mark.parametrize("weights", [[0.1, 0.2, 0.3, 0.4], [2, 0, 0, 2]])
def test_average_is_that_of_numpy(ensemble, branching, weights):
    for members in (ensemble, branching):
        soup = numbers(ee.average_parameters(members, weights))
        parts = [numbers(model) for model in members]
        assert list(soup) == list(parts[0])
        for path, x in soup.items():
            expected = np.average([part[path] for part in parts], axis=0, weights=weights)
            np.testing.assert_allclose(x, expected, rtol=2e-6, atol=1e-7)
    assert type(ee.average_parameters(ensemble, weights)) is eqx.nn.MLP
    close(ee.average_parameters(ensemble, [0, 0, 5, 0])(SQUARE[0, 0]), ensemble[2](SQUARE[0, 0]))


def test_average_of_half_precision_is_summed_in_float32():
    weights = [jnp.full((2, 3), x, jnp.bfloat16) for x in (256.0, 1.0, 1.0, 1.0)]
    models = [eqx.tree_at(lambda m: m.weight, linear(KEY), weight) for weight in weights]
    soup = ee.average_parameters(ee.stack(models))
    assert soup.weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(soup.weight.astype(jnp.float32), 65.0)  # summed in bfloat16: 256 / 4 = 64


@pytest.mark.usefixtures("unhooked")
def test_average_refuses_what_has_no_mean():
    ensemble, _, _ = built(CASES["integers and keys"])
    with pytest.raises(ee.MemberMismatchError, match=r"the .* array at `\.\w+` differs between members"):
        ee.average_parameters(ensemble)
    alike = ee.stack(
        [eqx.tree_at(lambda m: m.weight, linear(k), jnp.arange(6).reshape(2, 3)) for k in jax.random.split(KEY)]
    )
    assert ee.average_parameters(alike).weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    differing = eqx.tree_at(lambda e: e.stacked.weight, alike, alike.stacked.weight.at[1, 0, 0].set(9))
    with pytest.raises(ee.MemberMismatchError, match=r"the int32 array at `\.weight` differs between members"):
        ee.average_parameters(differing)
    with pytest.raises(ValueError, match="one weight per tree; got 2 trees and 3 weights"):
        ee.average_parameters(alike, [1, 1, 1])


# Random streams


KEYS = ee.member_keys(KEY, 4)


@pytest.mark.slow
def test_each_member_draws_its_own_dropout():
    ensemble = ee.build(lambda key: noisy(key, 0.5, jnp.ones(64)), 4, key=KEY)
    x = jnp.ones(64)
    plain, own = ensemble(x, key=KEY), ensemble(x, key=ee.Each(KEYS))
    assert len(np.unique(plain, axis=0)) == 1
    assert len(np.unique(own, axis=0)) == 4
    for model, key, y in zip(ensemble, KEYS, own, strict=True):
        np.testing.assert_array_equal(model(x, key=key), y)


# A PyTree like any other


@pytest.mark.slow
def test_an_argument_of_transforms(ensemble):
    x = SQUARE[0, 0]

    def value(ensemble, x):
        return jnp.sum(ensemble(x) ** 2)

    close(eqx.filter_jit(lambda ensemble, x: ensemble(x))(ensemble, x), every(ensemble, x))
    shapes = eqx.filter_eval_shape(lambda ensemble, x: ensemble(x), ensemble, x)
    assert shapes.shape == (4, 2)
    batched = eqx.filter_vmap(lambda ensemble, x: ensemble(x), in_axes=(None, 0))(ensemble, SQUARE[0])
    close(batched, jnp.stack([every(ensemble, x) for x in SQUARE[0]]))

    grads = eqx.filter_jit(eqx.filter_grad(value))(ensemble, x)
    for i, model in enumerate(ensemble):
        alone = eqx.filter_grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x)
        assert_close(ee.tree.take(grads.stacked, i), eqx.filter(alone, eqx.is_array), 1e-5)
        assert_close(eqx.filter(grads[i], eqx.is_array), eqx.filter(alone, eqx.is_array), 1e-5)
    assert len(grads) == len(grads.unstack()) == len(grads[1:]) + 1 == 4


class Mixture(eqx.Module):
    """A mixture of experts: an ensemble is a field like any other."""

    gate: eqx.nn.Linear
    experts: ee.Ensemble[eqx.nn.MLP]

    def __call__(self, x):
        return jax.nn.softmax(self.gate(x)) @ self.experts(x)


class ListMixture(eqx.Module):
    """The same with a Python list."""

    gate: eqx.nn.Linear
    experts: list

    def __call__(self, x):
        return jax.nn.softmax(self.gate(x)) @ jnp.stack([expert(x) for expert in self.experts])


@pytest.mark.slow
def test_a_field_of_a_bigger_module(ensemble):
    gate = eqx.nn.Linear(3, 4, key=jax.random.key(1))
    x = SQUARE.reshape(-1, 3)
    y = jnp.stack([jnp.sin(x[:, 0]), x[:, 1]], axis=1)

    @eqx.filter_jit
    def step(model):
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.3 * g, grads)), value

    ours, listed = Mixture(gate, ensemble), ListMixture(gate, ensemble.unstack())
    losses = []
    for _ in range(10):
        (ours, value), (listed, expected) = step(ours), step(listed)
        close(value, expected)
        losses.append(value)
    assert losses[-1] < 0.8 * losses[0]
    for i in range(4):
        assert_close(ours.experts[i], listed.experts[i], 1e-4)
        assert not np.allclose(ours.experts[i].layers[0].weight, ensemble[i].layers[0].weight)


@pytest.mark.slow
def test_ensembles_of_ensembles(nested):
    x = SQUARE[0, 0]
    assert isinstance(nested[1], ee.Ensemble)
    assert (len(nested), len(nested[1])) == (4, 3)
    loop = jnp.stack([every(inner, x) for inner in nested.unstack()])
    assert loop.shape == (4, 3, 2)
    close(nested(x), loop)
    close(nested[1:][[2]](x), loop[3:])
    batches = jnp.stack([jnp.stack([call_batch(model, SQUARE[0]) for model in inner]) for inner in nested])
    close(nested(ee.Batch(SQUARE[0])), jnp.swapaxes(batches, 1, 2))  # what a member returns for each example
    close(nested(ee.Each(SQUARE[0])), jnp.stack([every(inner, SQUARE[0, i]) for i, inner in enumerate(nested)]))
    own = jnp.stack([jnp.stack([call(m, SQUARE[i, j]) for j, m in enumerate(inner)]) for i, inner in enumerate(nested)])
    close(nested(ee.Each(ee.Each(SQUARE[:, :3]))), own)
    for i, key in enumerate(ee.member_keys(KEY, 4)):
        assert_same(nested[i], ee.build(mlp, 3, key=key))
    assert_same(ee.stack(nested.unstack()), nested)


def test_copies_and_maps_keep_the_type(ensemble):
    for same in (copy.copy(ensemble), copy.deepcopy(ensemble), jax.tree.map(lambda x: x, ensemble)):
        assert isinstance(same, ee.Ensemble)
        assert_same(same, ensemble)
    doubled = jax.tree.map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, ensemble)
    np.testing.assert_array_equal(doubled[1].layers[0].weight, 2 * ensemble[1].layers[0].weight)


@pytest.mark.slow
def test_under_a_transform_that_adds_an_axis(nested):
    """`filter_vmap` over what an ensemble of ensembles holds."""
    inner = eqx.filter_vmap(lambda key: ee.build(mlp, 3, key=key))(ee.member_keys(KEY, 4))
    got = eqx.filter_vmap(lambda ensemble: ensemble(SQUARE[0, 0]))(inner)
    close(got, nested(SQUARE[0, 0]))


@pytest.mark.slow
def test_an_ensemble_inside_vmap_over_something_else_is_one():
    ensemble, x = ee.build(linear, 3, key=KEY), jnp.arange(6.0).reshape(2, 3)
    assert_close(jax.vmap(lambda x: ensemble(x))(x), jnp.stack([ensemble(row) for row in x]), 1e-6)
    nested = ee.build(lambda key: ee.build(linear, 2, key=key), 3, key=KEY)
    assert eqx.filter_vmap(lambda inner: inner(x[0]))(nested.stacked).shape == (3, 2, 2)


@pytest.mark.slow
def test_short_texts():
    ensemble = ee.build(mlp, 3, key=KEY)
    nested = ee.build(lambda key: ee.build(mlp, 2, key=key), 3, key=KEY)
    assert repr(ensemble) == str(ensemble) == eqx.tree_pformat(ensemble) == "Ensemble[MLP](num_members=3)"
    assert repr(nested) == "Ensemble[Ensemble](num_members=3)"
    assert repr(eqx.filter(ensemble, eqx.is_inexact_array)) == "Ensemble[MLP](num_members=3)"
    assert repr(eqx.filter_jit(lambda e: e)(ensemble)) == "Ensemble[MLP](num_members=3)"
    assert "weight=f32[3,4,3]" in repr(ensemble.stacked)


def test_run_time_type_errors_are_short():
    @jaxtyped(typechecker=beartype)
    def score(ensemble: ee.Ensemble, x: int) -> int:
        return x

    with pytest.raises(TypeCheckError) as caught:
        score(ee.build(mlp, 3, key=KEY), "one")
    assert "Ensemble[MLP](num_members=3)" in str(caught.value)
    assert len(str(caught.value)) < 600


MODEL = mlp(KEY)
EQUAL = {
    "a closed-over model": lambda: ee.build(lambda key: MODEL, 3, key=KEY),
    "with a state": lambda: ee.build(lambda key: eqx.nn.make_with_state(mlp)(KEY), 3, key=KEY),
    "on a mesh": lambda: ee.build(lambda key: mlp(KEY), 4, mesh=ee.make_mesh(members=2), key=KEY),
}
DIFFERENT = {
    "one leaf of many": lambda: ee.build(
        lambda key: eqx.tree_at(lambda m: m.layers[0].bias, MODEL, jax.random.normal(key, (4,))), 3, key=KEY
    ),
    "other arguments": lambda: ee.build(lambda key, p: (MODEL, jnp.asarray(p)), zip={"p": [1.0, 1.0, 2.0]}, key=KEY),
    "zeros": lambda: ee.build(lambda key: jnp.zeros(3), 3, key=KEY),
    "one member": lambda: ee.build(lambda key: MODEL, 1, key=KEY),
}


@pytest.mark.parametrize("case", EQUAL)
def test_members_that_build_made_equal_are_warned_of(case):
    with pytest.warns(UserWarning, match="`build` made members that are all equal") as caught:
        EQUAL[case]()
    assert len(caught) == 1


@pytest.mark.parametrize("case", DIFFERENT)
def test_members_that_differ_are_not(case):
    DIFFERENT[case]()  # warnings are errors here


@pytest.mark.slow
def test_gradients_of_shared_arrays():
    """A trunk that all members train."""
    ensemble = ee.build(Branching, 3, shared=lambda model: model.trunk, key=KEY)
    x = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)

    def of_one(model):
        return jnp.mean(jax.vmap(lambda x: model.head(jnp.tanh(model.trunk(x))))(x) ** 2)

    def of_all(ensemble):
        return jnp.sum(ee.map_members(of_one)(ensemble))

    trained = eqx.filter_grad(of_all)(ensemble)
    alone = [eqx.filter_grad(of_one)(model) for model in ensemble.unstack()]
    for i, gradient in enumerate(alone):
        assert_close(trained.stacked.head.layers[0].weight[i], gradient.head.layers[0].weight, 1e-5)
    assert_close(trained.stacked.trunk.weight, sum(gradient.trunk.weight for gradient in alone), 1e-5)
