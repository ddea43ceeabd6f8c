"""`equinox.nn.inference_mode` of an ensemble is that of every member."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .factories import CASES, assert_same, data, relaxed
from .marking import slow_but

KEY = jax.random.key(5)


class Dropping(eqx.Module):
    """Dropout in a list, and without any function among the leaves, so that `jax.jit` takes an ensemble as it is."""

    linear: eqx.nn.Linear
    layers: list[eqx.nn.Dropout]

    def __init__(self, key, p=0.5):
        self.linear = eqx.nn.Linear(3, 8, key=key)
        self.layers = [eqx.nn.Dropout(p), eqx.nn.Dropout(p)]

    def __call__(self, x, key=None):
        return self.layers[1](self.layers[0](self.linear(x), key=key), key=key)


class Pair(eqx.Module):
    members: ee.Ensemble[Dropping]
    dropout: eqx.nn.Dropout


def inner(key):
    return ee.build(Dropping, 2, key=key)


def first(made):
    return made[0] if isinstance(made, tuple) else made


MAKES = {name: case.make for name, case in CASES.items()} | {
    "a list": Dropping,
    "ensembles": inner,
    "a transformer's layers": lambda key: [eqx.nn.MultiheadAttention(2, 4, dropout_p=0.5, key=key), Dropping(key)],
}


def modes(model):
    """Every flag of a model, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path): x for path, x in leaves if jax.tree_util.keystr(path).endswith(".inference")}


@pytest.fixture(scope="module")
def dropping():
    return ee.build(Dropping, 3, key=KEY)


@pytest.fixture(scope="module")
def quiet(dropping):
    return eqx.nn.inference_mode(dropping)


@pytest.mark.parametrize("name", slow_but(["a list", "attention and dropout"], MAKES))
def test_mode_of_all_is_mode_of_each(name):
    ensemble = first(ee.build(MAKES[name], 3, key=KEY))
    quiet = eqx.nn.inference_mode(ensemble)
    assert jax.tree.structure(quiet) == jax.tree.structure(ensemble)
    for got, member in zip(quiet, ensemble, strict=True):
        want = eqx.nn.inference_mode(member)
        assert all(modes(want).values())
        assert modes(got) == modes(want)
        assert eqx.tree_equal(got, want)
    assert eqx.tree_equal(eqx.nn.inference_mode(quiet, value=False), ensemble)
    assert_same(quiet, ensemble)


@pytest.mark.slow
def test_some_case_has_flags():
    assert len([name for name, make in MAKES.items() if modes(first(make(KEY)))]) >= 5


def test_calls(dropping, quiet):
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        dropping(jnp.ones(3))
    want = jnp.stack([member.linear(jnp.ones(3)) for member in dropping])
    np.testing.assert_allclose(quiet(jnp.ones(3)), want, rtol=1e-6)
    np.testing.assert_allclose(eqx.filter_jit(lambda e, x: e(x))(quiet, jnp.ones(3)), want, rtol=1e-6)
    inside = eqx.filter_jit(lambda e, x: eqx.nn.inference_mode(e)(x))(dropping, jnp.ones(3))
    np.testing.assert_allclose(inside, want, rtol=1e-6)
    # Here flags are traced scalars, which carry no members.
    weights = jax.jit(lambda e: (e.num_members, e[1].linear.weight))(quiet)
    np.testing.assert_array_equal(weights[1], dropping[1].linear.weight)


@pytest.mark.slow
def test_stateful_members_leave_their_statistics_alone():
    ensemble, state = ee.build(CASES["conv and batch norm"].make, 3, key=KEY)
    x = data(4)[0]
    run = lambda model, x, state: jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    with relaxed():  # equinox's layer mixes dtypes
        _, kept = ee.map_members(run)(eqx.nn.inference_mode(ensemble), x, state)
        _, moved = ee.map_members(run)(ensemble, x, state)
    assert_same(kept, state)
    with pytest.raises(AssertionError):
        assert_same(moved, state)


def test_as_part_of_a_bigger_model(dropping):
    both = Pair(dropping, eqx.nn.Dropout(0.1))
    quiet = eqx.nn.inference_mode({"a": both, "b": [dropping, eqx.nn.Linear(2, 2, key=KEY)]})
    assert quiet["a"].dropout.inference
    for ensemble in (quiet["a"].members, quiet["b"][0]):
        assert list(modes(ensemble[2]).values()) == [True, True]


def test_smaller_and_larger_ensembles_keep_their_mode(dropping, quiet, tmp_path):
    others = ee.build(Dropping, 2, key=jax.random.key(1))
    ee.save(tmp_path / "m", quiet)
    found = [
        quiet[1:],
        quiet[[0, 2]],
        ee.stack(quiet.unstack()),
        ee.concatenate([quiet, eqx.nn.inference_mode(others)]),
        jax.tree.map(lambda x: x, quiet),
        ee.load(tmp_path / "m", quiet),
        ee.load(tmp_path / "m", lambda key: eqx.nn.inference_mode(Dropping(key))),
    ]
    for ensemble in found:
        assert list(modes(ensemble).values()) == [True] * 2
        assert list(modes(eqx.nn.inference_mode(ensemble, value=False)).values()) == [False] * 2
    assert eqx.nn.inference_mode(ee.average_parameters(quiet), value=False).layers[1].inference is False
    with pytest.raises(ee.MemberMismatchError, match="inference"):
        ee.concatenate([quiet, others])


@pytest.mark.slow
def test_predictions(dropping, quiet):
    x = data(6)[0][:, :3]
    plain = ee.predict(dropping, x)
    np.testing.assert_array_equal(ee.predict(quiet, x), plain)
    np.testing.assert_array_equal(ee.predict(quiet, x, inference=False, key=KEY), plain)
    again = eqx.nn.inference_mode(quiet, value=False)
    assert (np.asarray(ee.predict(again, x, inference=False, key=KEY)) == 0).any()


@pytest.mark.slow
def test_training_in_inference_mode_has_no_dropout(quiet):
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x)))[:, :2] - y) ** 2)

    x, y = data(12)
    fit = lambda ensemble: ee.fit(ensemble, loss, optax.adam(1e-2), (x[:, :3], y), steps=5, batch_size=4, key=KEY)
    never = ee.build(lambda key: Dropping(key, p=0.0), 3, key=KEY)
    run = fit(quiet)
    arrays = lambda ensemble: numpy_of(ensemble.stacked.linear)
    jax.tree.map(np.testing.assert_array_equal, arrays(run.ensemble), arrays(fit(never).ensemble))
    assert list(modes(run.ensemble).values()) == [True] * 2
    again = fit(eqx.nn.inference_mode(quiet, value=False)).ensemble
    assert not np.array_equal(again.stacked.linear.weight, run.ensemble.stacked.linear.weight)
    assert list(modes(eqx.nn.inference_mode(again)).values()) == [True] * 2


def numpy_of(tree):
    return jax.tree.map(np.asarray, eqx.filter(tree, eqx.is_array))


def test_gradients_leave_flags_alone(dropping):
    grads = eqx.filter_grad(lambda e: jnp.sum(ee.predict(e, jnp.ones((2, 3)))))(dropping)
    assert modes(grads) == {}
    moved = eqx.apply_updates(dropping, grads)
    assert modes(moved) == modes(dropping)
    assert modes(eqx.nn.inference_mode(moved)[0]) == {".layers[0].inference": True, ".layers[1].inference": True}
