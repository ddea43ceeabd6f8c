import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.plan import Blocks, Vmap

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
PLANS = [Vmap(), Blocks(), Blocks(1), Blocks(2), Blocks(5), Blocks(8)]


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key), 5, key=KEY)


def batch_of(count=6):
    kx, ky = jax.random.split(KEY)
    return jax.random.normal(kx, (count, 3)), jax.random.normal(ky, (count, 2))


def mse(model, x, y, *, scale=1.0):
    return {"mse": scale * jnp.mean((jax.vmap(model)(x) - y) ** 2), "model": model, "name": "mse"}


def looped(ensemble, *args, **kwargs):
    one = lambda node, i: jax.tree.map(lambda x: x[i], node.value) if isinstance(node, ee.Each) else node
    outs = [
        mse(member, *(one(arg, i) for arg in args), **{name: one(arg, i) for name, arg in kwargs.items()})
        for i, member in enumerate(ensemble.unstack())
    ]
    return jnp.stack([out["mse"] for out in outs])


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_every_plan_is_the_loop(ensemble, plan):
    x, y = batch_of()
    scale = ee.Each(jnp.arange(1.0, 6.0))
    out = ee.map_members(mse, plan=plan)(ensemble, x, y, scale=scale)
    np.testing.assert_allclose(out["mse"], looped(ensemble, x, y, scale=scale), rtol=1e-6)
    assert out["name"] == "mse"
    assert_same(out["model"], ensemble)
    assert jax.tree.structure(out["model"]) == jax.tree.structure(ensemble)


@pytest.mark.slow
def test_shared_or_one_each_is_never_guessed_from_a_size(ensemble):
    x = jax.random.normal(KEY, (5, 3))
    call = ee.map_members(lambda model, x: jax.vmap(model)(x) if x.ndim == 2 else model(x))
    assert call(ensemble, x).shape == (5, 5, 2)
    own = call(ensemble, ee.Each(x))
    assert own.shape == (5, 2)
    np.testing.assert_allclose(own, jnp.stack([m(x[i]) for i, m in enumerate(ensemble)]), rtol=1e-6)


def test_marks_are_found_at_any_depth(ensemble):
    x = jax.random.normal(KEY, (5, 3))
    out = ee.map_members(lambda tree: {"y": tree["models"][0](tree["x"]), "tag": tree["tag"]})(
        {"models": [ensemble], "x": ee.Each(x), "tag": "left as it is"}
    )
    np.testing.assert_array_equal(out["y"], ensemble(ee.Each(x)))
    assert out["tag"] == "left as it is"


def test_out_axis(ensemble):
    x, _ = batch_of()
    call = lambda **options: ee.map_members(lambda model, x: jax.vmap(model)(x), **options)(ensemble, x)
    np.testing.assert_array_equal(call(out_axis=1), jnp.moveaxis(call(), 0, 1))
    np.testing.assert_array_equal(call(out_axis=-1), jnp.moveaxis(call(), 0, -1))


@pytest.mark.slow
def test_composes_with_the_transformations(ensemble):
    x, y = batch_of()
    loss = lambda ensemble, x, y: jnp.sum(ee.map_members(mse)(ensemble, x, y)["mse"])
    grads = eqx.filter_jit(eqx.filter_grad(loss))(ensemble, x, y)
    for i, member in enumerate(ensemble.unstack()):
        alone = eqx.filter_grad(lambda model: mse(model, x, y)["mse"])(member)
        assert_close(ee.tree.take(grads.stacked, i).layers, alone.layers, 1e-5)
    per_example = jax.vmap(lambda x, y: ee.map_members(mse)(ensemble, x[None], y[None])["mse"])(x, y)
    assert per_example.shape == (6, 5)


def test_keeps_the_name_and_is_a_decorator():
    @ee.map_members
    def documented(model, x):
        """What it says."""
        return model(x)

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it says."


def test_plans_are_static_and_compared_by_value():
    traces = []

    @eqx.filter_jit
    def run(plan, x):
        traces.append(plan)
        return ee.map_members(lambda x: 2 * x, plan=plan)(ee.Each(x))

    for plan in (Blocks(2), Blocks(2), Vmap(), Vmap(), Blocks(3)):
        np.testing.assert_array_equal(run(plan, jnp.arange(5.0)), 2 * jnp.arange(5.0))
    assert traces == [Blocks(2), Vmap(), Blocks(3)]


@pytest.mark.parametrize("plan", [Vmap(), Blocks(2)], ids=repr)
def test_typed_keys_and_integers_pass(plan):
    keys = ee.Each(jax.random.split(KEY, 5))
    out = ee.map_members(lambda key, i: (jax.random.fold_in(key, i), i + 1), plan=plan)(keys, ee.Each(np.arange(5)))
    expected = jnp.stack([jax.random.fold_in(key, i) for i, key in enumerate(keys.value)])
    assert (out[0].value == expected).all()
    np.testing.assert_array_equal(out[1], np.arange(1, 6))


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_arrays_without_elements_pass(ensemble, plan):
    """Some optimisers keep such arrays in their state."""
    empty = jnp.zeros((ensemble.num_members, 0, 3))
    found = ee.map_members(lambda model, x, y: (x, y + 1), plan=plan)(ensemble, ee.Each(empty), jnp.zeros(2))
    assert found[0].shape == empty.shape
    np.testing.assert_array_equal(found[1], np.ones((ensemble.num_members, 2)))


@pytest.mark.parametrize("plan", [Vmap(), Blocks(2)], ids=repr)
def test_constants_are_returned_once(ensemble, plan):
    def constants(model):
        return 2.0, float("nan"), "text", None, lambda x: x + 1, jnp.sum(model.layers[0].weight)

    out = ee.map_members(constants, plan=plan)(ensemble)
    assert out[0] == 2.0
    assert out[2] == "text"
    assert out[4](1) == 2
    assert out[5].shape == (5,)


class Net(eqx.Module):
    trunk: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.trunk = eqx.nn.Linear(3, 4, key=jax.random.key(7))
        self.head = eqx.nn.Linear(4, 2, key=key)
        self.dropout = eqx.nn.Dropout(0.1, inference=True)

    def __call__(self, x):
        return self.dropout(self.head(jax.nn.tanh(self.trunk(x))))


class Layers(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(3, 3, key=key), eqx.nn.Linear(3, 2, key=key)]

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


SGD = optax.sgd(0.1, momentum=0.9)


@ee.map_members
def sgd_state(model):
    return SGD.init(eqx.filter(model, eqx.is_inexact_array))


def sgd_step(model, state, x, y):
    loss, gradient = eqx.filter_value_and_grad(lambda model: mse(model, x, y)["mse"])(model)
    update, state = SGD.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, update), state, loss


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Vmap(), Blocks(2)], ids=repr)
def test_what_comes_back_goes_in_again(ensemble, plan):
    x, y = batch_of()
    ensemble = ee.build(Layers, 3, key=KEY)
    step, state = ee.map_members(sgd_step, plan=plan), sgd_state(ensemble)
    assert type(state[0]) is ee.Each
    assert jax.tree.leaves(state[1]) == []

    arrays, constants = eqx.partition((ensemble, state), eqx.is_array)

    def scanned(arrays, _):  # which needs the same structure before and after
        *after, loss = step(*eqx.combine(arrays, constants), x, y)
        return eqx.filter(tuple(after), eqx.is_array), loss

    arrays, losses = jax.jit(lambda arrays: jax.lax.scan(scanned, arrays, length=3))(arrays)
    ours, _ = eqx.combine(arrays, constants)
    again = (ensemble, state)
    for _ in range(3):
        again = step(*again, x, y)[:2]
    assert jax.tree.structure(again) == jax.tree.structure((ensemble, state))
    assert_close(again[0], ours, 1e-5)
    for i, model in enumerate(ensemble.unstack()):
        alone = (model, SGD.init(eqx.filter(model, eqx.is_inexact_array)))
        for loss in losses[:, i]:
            *alone, expected = sgd_step(*alone, x, y)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert_close(ours[i], alone[0], 1e-5)


def test_what_members_share_stays_shared_until_it_is_changed():
    models = [Net(key) for key in jax.random.split(KEY, 3)]
    members = ee.stack(models, shared=lambda model: model.trunk)
    halve = lambda model: eqx.tree_at(lambda model: model.head.weight, model, replace_fn=lambda w: w / 2)
    for plan in (Vmap(), Blocks(2)):
        halved = ee.map_members(halve, plan=plan)(members)
        assert jax.tree.structure(halved) == jax.tree.structure(members)
        assert halved.stacked.trunk.weight.shape == (4, 3)
        assert_same(halved.unstack(), [halve(model) for model in models])
    own = ee.map_members(lambda model: jax.tree.map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, model))(members)
    assert own.stacked.trunk.weight.shape == (3, 4, 3)
    wrapped = ee.map_members(lambda model: (model.trunk, {"net": model}))(members)
    assert wrapped[0].weight.shape == (4, 3)
    assert wrapped[1]["net"].stacked.trunk.weight.shape == (4, 3)


def test_marks_of_what_is_returned(ensemble):
    named = collections.namedtuple("named", "loss count")
    fn = lambda model: (named(model(jnp.ones(3)), 1), {"keys": jax.random.key(0)}, [np.float32(1), None, "text"])
    marked, keys, plain = ee.map_members(fn)(ensemble)
    assert marked.value.loss.shape == (5, 2)
    assert marked.value.count == 1
    assert keys["keys"].value.shape == (5,)
    assert (plain[0].shape, plain[1:]) == ((5,), [None, "text"])
    models = ee.map_members(lambda model: model)(ee.Each(ensemble.stacked))
    assert_same(models.stacked, ensemble.stacked)
    moved = ee.map_members(lambda model, x: (model, model(x)), out_axis=1)(ensemble, jnp.ones(3))
    assert_same(moved[0], ensemble)
    assert moved[1].shape == (2, 5)
