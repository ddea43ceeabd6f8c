"""Python numbers that differ between members: arrays in the stacked model, numbers in a single one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(3)
RATES = [0.1, 0.3, 0.7]
ROWS = (jnp.linspace(-1.0, 1.0, 24).reshape(8, 3), jnp.ones((8, 1)))


class Net(eqx.Module):
    """Numbers as a constructor keeps them: given, derived, instead of an array, next to parameters without axes."""

    layer: eqx.nn.Linear
    rate: float
    kept: float
    temperature: jax.Array
    log_rate: jax.Array

    def __init__(self, key, rate):
        self.layer = eqx.nn.Linear(3, 1, key=key)
        self.rate, self.kept = rate, 1 - rate
        self.temperature, self.log_rate = jnp.asarray(1.5), jnp.log(rate)

    def __call__(self, x):
        return self.layer(x) * self.kept * jnp.exp(self.log_rate) / self.temperature + self.rate


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(ensemble, **options):
    return ee.fit(ensemble, loss, optax.adamw(0.05), ROWS, steps=6, key=KEY, **options)


def trained_alone(model):
    """The plain loop over one model: Equinox and optax, nothing of ours."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    optimiser = optax.adamw(0.05)
    state = optimiser.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(6):
            grads = jax.grad(lambda p: loss(eqx.combine(p, rest), ROWS, None))(params)
            updates, state = optimiser.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return eqx.combine(params, rest)


def of_zip():
    return ee.build(Net, zip={"rate": RATES}, key=KEY)


def of_product():
    return ee.build(Net, product={"rate": jnp.asarray(RATES)}, key=KEY)


def of_stack():
    keys = ee.member_keys(KEY, 3)
    return ee.stack([Net(key, rate) for key, rate in zip(keys, RATES, strict=True)], promote_scalars=True)


@pytest.fixture(scope="module", params=[of_zip, of_product, of_stack], ids=["zip", "product", "stack"])
def ensemble(request):
    return request.param()


def names_trained(ensemble, **options):
    params = ee.train.init(ensemble, optax.sgd(0.1), key=KEY, **options).moving.params
    return {name for name in vars(params) if jax.tree.leaves(getattr(params, name))}


def test_one_member_has_its_numbers_again(ensemble):
    for member, rate in zip(ensemble, RATES, strict=True):
        assert type(member.rate) is float
        assert member.rate == rate
        assert type(member.kept) is float
        assert member.log_rate.shape == member.temperature.shape == ()
    assert type(ensemble[-1].rate) is float
    traced = eqx.filter_jit(lambda ensemble, x: ensemble[1](x))(ensemble, ROWS[0][0])
    np.testing.assert_allclose(traced, ensemble[1](ROWS[0][0]), rtol=1e-6)


def test_numbers_are_constants_and_members_train_as_alone(ensemble):
    run = fitted(ensemble)
    for i, alone in enumerate(map(trained_alone, ensemble)):
        member = run.ensemble[i]
        assert (member.rate, member.kept) == (alone.rate, alone.kept)
        got, expected = eqx.filter(member, eqx.is_array), eqx.filter(alone, eqx.is_array)
        close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, got, expected)
        assert float(member.temperature) != 1.5  # a parameter without axes is one all the same
    assert fitted(run.ensemble).ensemble[0].rate == RATES[0]
    assert fitted(run).ensemble[0].rate == RATES[0]


HANDED_ON = {
    "one": lambda e, path: e[[1]],
    "some": lambda e, path: e[[2, 0]],
    "joined": lambda e, path: ee.concatenate([e[:1], e[1:]]),
    "stacked again": lambda e, path: ee.stack(e.unstack(), promote_scalars=True),
    "a tree": lambda e, path: jax.tree.map(lambda x: x, e),
    "compiled": lambda e, path: eqx.filter_jit(lambda e: e)(e),
    "apart and together": lambda e, path: eqx.combine(*eqx.partition(e, eqx.is_array)),
    "loaded": lambda e, path: (ee.save(path, e), ee.load(path, e))[1],
    "loaded in part": lambda e, path: (ee.save(path, e), ee.load(path, e, members=[0, 2]))[1],
    "loaded by its maker": lambda e, path: (ee.save(path, e), ee.load(path, lambda key: Net(key, 0.0)))[1],
    "in a training state": lambda e, path: ee.train.init(e, optax.sgd(0.1), key=KEY).ensemble,
}


@pytest.mark.parametrize("way", HANDED_ON)
def test_the_mark_is_never_lost(way, tmp_path):
    handed = HANDED_ON[way](of_zip(), tmp_path / "model")
    assert type(handed[0].rate) is float
    assert names_trained(handed) == {"layer", "temperature", "log_rate"}


def test_members_of_members():
    nested = ee.build(lambda key: ee.build(Net, zip={"rate": RATES}, key=key), 2, key=KEY)
    params = ee.train.init(nested, optax.sgd(0.1), key=KEY).moving.params
    assert params.stacked.rate is None
    assert params.stacked.log_rate.shape == (2, 3)
    assert type(nested[0][1].rate) is float


def test_an_average_has_a_number():
    average = ee.average(of_product())
    assert type(average.rate) is float
    np.testing.assert_allclose(average.rate, np.mean(RATES), rtol=1e-6)


def test_numbers_that_are_shared_must_be_equal():
    models = [Net(KEY, rate).layer for rate in RATES]
    trees = [{"net": net, "dropout": eqx.nn.Dropout(rate)} for net, rate in zip(models, RATES, strict=True)]
    with pytest.raises(ee.MemberMismatchError, match=r"shared nodes are equal.*\n.*dropout"):
        ee.stack(trees, shared=lambda tree: tree["dropout"], promote_scalars=True)


# `trainable` sees what one member holds

ASKED = {
    "default": ({}, {"layer", "temperature", "log_rate"}),
    "all": ({"trainable": eqx.is_inexact_array_like}, {"layer", "rate", "kept", "temperature", "log_rate"}),
    "matrices": ({"trainable": lambda leaf: leaf.ndim == 2}, {"layer"}),
    "no axes": ({"trainable": lambda leaf: leaf.ndim == 0}, {"temperature", "log_rate"}),
    "jax arrays": ({"trainable": lambda leaf: isinstance(leaf, jax.Array)}, {"layer", "temperature", "log_rate"}),
}


@pytest.mark.parametrize("case", ASKED)
def test_trainable_decides(case):
    options, expected = ASKED[case]
    ensemble = of_product()
    assert names_trained(ensemble, **options) == expected
    # The test that finds a leading axis in the way: what Equinox itself chooses of one member.
    (test,) = options.values() or (eqx.is_inexact_array,)
    if case not in ("matrices", "no axes"):  # which need Python numbers as axes
        chosen = eqx.filter(ensemble[0], test)
        assert {name for name in vars(chosen) if jax.tree.leaves(getattr(chosen, name))} == expected


def test_booleans_decide_too():
    ensemble = of_product()
    mask = eqx.tree_at(lambda tree: tree.rate, jax.tree.map(lambda _: False, ensemble.stacked), replace=True)
    assert names_trained(ensemble, trainable=mask) == {"rate"}
    run = fitted(ensemble, trainable=mask)
    assert (run.ensemble.stacked.rate != ensemble.stacked.rate).all()
    np.testing.assert_array_equal(run.ensemble.stacked.layer.weight, ensemble.stacked.layer.weight)
    assert type(run.ensemble[0].rate) is float


def test_matrices_of_one_member_train_and_biases_do_not():
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    run = fitted(ensemble, trainable=lambda leaf: leaf.ndim == 2)
    np.testing.assert_array_equal(run.ensemble.stacked.bias, ensemble.stacked.bias)
    assert (run.ensemble.stacked.weight != ensemble.stacked.weight).all()


def test_a_choice_by_value_differs_between_members():
    ensemble = ee.stack([{"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": jnp.zeros(2), "b": jnp.ones(2)}])
    with pytest.raises(ValueError, match=r"`train.init` trains the same leaves.*\['a'\].*\n.*not by values"):
        ee.train.init(ensemble, optax.sgd(0.1), trainable=lambda leaf: bool(leaf.sum() > 0), key=KEY)
