import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.plan import Chunked, Sequential, Unrolled, Vmap

from ..factories import assert_close, assert_same

KEY = jax.random.key(0)
PLANS = [Vmap(), Chunked(1), Chunked(2), Chunked(3), Chunked(5), Chunked(8), Sequential(), Unrolled()]


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


@pytest.mark.usefixtures("unhooked")
def test_a_batch_is_for_calls_of_an_ensemble(ensemble):
    with pytest.raises(TypeError, match=r"pass `x` instead of `Batch\(x\)`"):
        ee.map_members(lambda model, x: model(x))(ensemble, ee.Batch(jnp.ones((2, 3))))


def test_one_after_another_is_each_alone_bit_for_bit(ensemble):
    x, y = batch_of()
    value_and_grad = lambda model, x, y: eqx.filter_value_and_grad(lambda model: mse(model, x, y)["mse"])(model)
    out = ee.map_members(value_and_grad, plan=Sequential())(ensemble, x, y)
    alone = eqx.filter_jit(value_and_grad)
    for i, member in enumerate(ensemble.unstack()):
        assert_same((out[0][i], out[1][i]), alone(member, x, y))


def test_shared_or_one_each_is_never_guessed_from_a_size(ensemble):
    x = jax.random.normal(KEY, (5, 3))
    call = ee.map_members(lambda model, x: jax.vmap(model)(x) if x.ndim == 2 else model(x))
    assert call(ensemble, x).shape == (5, 5, 2)
    own = call(ensemble, ee.Each(x))
    assert own.shape == (5, 2)
    np.testing.assert_allclose(own, jnp.stack([m(x[i]) for i, m in enumerate(ensemble)]), rtol=1e-6)
    np.testing.assert_array_equal(call(ensemble, ee.Each(x.T, axis=1)), own)
    np.testing.assert_array_equal(call(ensemble, ee.Each(x.T, axis=-1)), own)


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

    for plan in (Chunked(2), Chunked(2), Sequential(), Sequential(), Chunked(3)):
        np.testing.assert_array_equal(run(plan, jnp.arange(5.0)), 2 * jnp.arange(5.0))
    assert traces == [Chunked(2), Sequential(), Chunked(3)]


@pytest.mark.parametrize("plan", [Chunked(2), Unrolled()], ids=repr)
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


@pytest.mark.parametrize("plan", [Sequential(), Chunked(2)], ids=str)
def test_a_second_call_compiles_nothing(ensemble, compiled, plan):
    """Outside `jax.jit`, with the same function and other values."""
    x, y = batch_of()
    other = x + 1
    ee.map_members(mse, plan=plan)(ensemble, x, y)
    with compiled() as programs:
        again = ee.map_members(mse, plan=plan)(ensemble, other, y)
    assert not programs
    np.testing.assert_allclose(again["mse"], looped(ensemble, other, y), rtol=1e-6)
    with compiled() as programs:
        ee.map_members(lambda model: mse(model, x, y)["mse"], plan=plan)(ensemble)
    assert programs


SCALE = 1.0


def test_a_cached_program_uses_no_old_variable(ensemble, monkeypatch):
    """Global ones, enclosing ones, and those that only a function inside reads."""
    factor = jnp.ones(())

    def scaled(model, x):
        return (lambda: jax.vmap(model)(x) * SCALE)() * factor

    mapped, want = ee.map_members(scaled, plan=Sequential()), ee.map_members(scaled)
    x, _ = batch_of()
    for _ in range(2):
        np.testing.assert_allclose(mapped(ensemble, x), want(ensemble, x), rtol=1e-6)
        monkeypatch.setitem(scaled.__globals__, "SCALE", 3.0)
    factor = jnp.array(5.0)
    np.testing.assert_allclose(mapped(ensemble, x), want(ensemble, x), rtol=1e-6)
    np.testing.assert_allclose(mapped(ensemble, x), 15 * jnp.stack([jax.vmap(m)(x) for m in ensemble]), rtol=1e-5)


def test_the_value_of_what_members_share_is_known_under_every_plan(ensemble):
    """Under `Vmap` nothing but members is traced, so that a function may read it."""

    def some(model, count):
        return jnp.sum(model(jnp.ones(3)) * (2 if count > 1 else 1)) * jnp.ones(int(count))

    for count in (1, 3):
        want = ee.map_members(some)(ensemble, np.asarray(count))
        found = ee.map_members(some, plan=Sequential())(ensemble, np.asarray(count))
        np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (float, r"at `<root>`: got -?\d\.\d+ and -?\d\.\d+\nReturn an array"),
        (lambda x: {"a": x, "b": [1, f"{x}"]}, r"at `\['b'\]\[1\]`: got '.*' and '.*'\n"),
        (lambda x: (x, lambda: float(x)), r"at `\[1\]`: .* in closure variable `x`"),
        (lambda x: ("positive" if x > 0 else None, 2), r"at `\[0\]`: got (None|'positive') and"),
    ],
)
def test_constants_that_differ_between_members(ensemble, output, message):
    fn = lambda model: output(model.layers[0].weight[0, 0])
    with pytest.raises(ee.MemberMismatchError, match=rf"`map_members\(<lambda>\)` returns .* once(.|\n)*{message}"):
        ee.map_members(fn, plan=Unrolled())(ensemble)


@pytest.mark.parametrize("plan", [Vmap(), Chunked(3), Sequential(), Unrolled()], ids=repr)
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

    def __init__(self, key, rate=0.1):
        self.trunk = eqx.nn.Linear(3, 4, key=jax.random.key(7))
        self.head = eqx.nn.Linear(4, 2, key=key)
        self.dropout = eqx.nn.Dropout(rate, inference=True)

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


@pytest.mark.parametrize("plan", [Vmap(), Chunked(2), Unrolled()], ids=repr)
def test_what_comes_back_goes_in_again(ensemble, plan):
    x, y = batch_of()
    ensemble = ee.build(Layers, ids=[3, 1, 4], key=KEY)
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
    assert ours.ids.tolist() == [3, 1, 4]
    for i, model in enumerate(ensemble.unstack()):
        alone = (model, SGD.init(eqx.filter(model, eqx.is_inexact_array)))
        for loss in losses[:, i]:
            *alone, expected = sgd_step(*alone, x, y)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert_close(ours[i], alone[0], 1e-5)


def test_what_members_share_stays_shared_until_it_is_changed():
    models = [Net(key, rate) for key, rate in zip(jax.random.split(KEY, 3), (0.1, 0.2, 0.3), strict=True)]
    members = ee.stack(models, shared=lambda model: model.trunk, promote_scalars=True)
    halve = lambda model: eqx.tree_at(lambda model: model.head.weight, model, replace_fn=lambda w: w / 2)
    for plan in (Vmap(), Chunked(2), Unrolled()):
        halved = ee.map_members(halve, plan=plan)(members)
        assert jax.tree.structure(halved) == jax.tree.structure(members)
        assert halved.shared.trunk.weight.shape == (4, 3)
        assert_same(halved.unstack(), [halve(model) for model in models])  # with their Python floats
    own = members.map(lambda model: jax.tree.map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, model))
    assert own.stacked.trunk.weight.shape == (3, 4, 3)
    assert own[1].dropout.p == 0.4
    wrapped = members.map(lambda model: (model.trunk, {"net": model}))
    assert wrapped[0].weight.shape == (4, 3)
    assert wrapped[1]["net"].shared.trunk.weight.shape == (4, 3)


def test_marks_of_what_is_returned(ensemble):
    named = collections.namedtuple("named", "loss count")
    fn = lambda model: (named(model(jnp.ones(3)), 1), {"keys": jax.random.key(0)}, [np.float32(1), None, "text"])
    marked, keys, plain = ensemble.map(fn)
    assert marked.value.loss.shape == (5, 2)
    assert marked.value.count == 1
    assert keys["keys"].value.shape == (5,)
    assert (plain[0].shape, plain[1:]) == ((5,), [None, "text"])
    with pytest.raises(AttributeError, match=r"`\.value\.loss`"):
        print(marked.loss)
    models = ee.map_members(lambda model: model)(ee.Each(ensemble.to_stacked()))
    assert_same(models.value, ensemble.to_stacked())
    layers = ee.from_stacked([(jnp.ones((5, 2)), jnp.ones(5))])  # a model that is no Module
    gradients, loss, pair = layers.map(lambda model: (jax.tree.map(jnp.sin, model), [(1.0, jnp.ones(2))], (1, 2)))
    assert type(gradients) is ee.Ensemble
    assert (loss[0][1].shape, pair) == ((5, 2), (1, 2))
    params = ee.map_members(lambda own: (own, {"w": own["w"][0]}))(ee.Each({"w": jnp.ones((5, 2))}))
    assert (type(params[0]), params[1]["w"].shape) == (ee.Each, (5,))
    moved = ee.map_members(lambda model, x: (model, model(x)), out_axis=1)(ensemble, jnp.ones(3))
    assert_same(moved[0], ensemble)
    assert moved[1].shape == (2, 5)


@pytest.mark.usefixtures("unhooked")
def test_an_error_names_what_was_given_whole(ensemble):
    with pytest.raises(TypeError) as raised:
        ee.map_members(mse)(ensemble, x=jnp.ones((5, 6, 3)), y=jnp.ones((6, 2)))
    assert "whole of `x`" in raised.value.__notes__[-1]


def test_the_error_of_a_function_is_its_own(ensemble):
    def wrong(model, x):
        raise TypeError("mine")

    with pytest.raises(TypeError) as raised:
        ee.map_members(wrong, plan=Sequential())(ensemble, jnp.ones(3))
    assert str(raised.value) == "mine"


def test_callable_modules_and_methods(ensemble, compiled):
    class Scaled(eqx.Module):
        scale: jax.Array

        def __call__(self, model, x):
            return self.scale * model(x)

        def twice(self, model, x):
            return 2 * self.scale * model(x)

    x, want = jnp.ones(3), ensemble(jnp.ones(3))
    for scale in (1.0, 3.0):
        module = Scaled(jnp.asarray(scale))
        for fn, factor in ((module, scale), (module.twice, 2 * scale)):
            with compiled() as programs:
                found = ee.map_members(fn, plan=Sequential())(ensemble, x)
            np.testing.assert_allclose(found, factor * want, rtol=1e-6)
    assert not programs
