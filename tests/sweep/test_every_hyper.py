"""Whatever a hyper-parameter belongs to: a member of the sweep is the single run with its values as constants."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (24, 3))
Y = jnp.sin(X[:, :1])
OPTIONS = {"epochs": 5, "batch_size": 8, "progress": False, "key": KEY}


class Model(eqx.Module):
    layer: eqx.nn.Linear
    last: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, dropout, *, key):
        first, last = jax.random.split(key)
        self.layer, self.last = eqx.nn.Linear(3, 8, key=first), eqx.nn.Linear(8, 1, key=last)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x, *, key):
        return self.last(self.dropout(jax.nn.tanh(self.layer(x)), key=key))


def loss(model, batch, key, *, weight=0.01):
    x, y = batch
    prediction = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return jnp.mean((prediction - y) ** 2) + weight * jnp.sum(model.layer.weight**2)


def of_loss(model, batch, key, hyper):
    return loss(model, batch, key, weight=hyper["weight"])


COSINE = optax.cosine_decay_schedule(0.05, 100)

# The optimiser as a function of the hyper-parameter, and as someone with one model writes it.
OPTIMISERS = {
    "adamw lr": ([1e-3, 1e-2, 3e-2], lambda v: optax.adamw(v)),
    "adamw b1": ([0.0, 0.5, 0.9], lambda v: optax.adamw(1e-2, b1=v)),
    "adamw b2": ([0.9, 0.99, 0.999], lambda v: optax.adamw(1e-2, b2=v)),
    "adamw eps": ([1e-8, 1e-4, 1e-2], lambda v: optax.adamw(1e-2, eps=v)),
    "adamw weight decay": ([0.0, 0.1, 1.0], lambda v: optax.adamw(1e-2, weight_decay=v)),
    "sgd lr": ([1e-3, 1e-2, 1e-1], lambda v: optax.sgd(v, momentum=0.9)),
    "sgd momentum": ([0.0, 0.5, 0.9], lambda v: optax.sgd(1e-2, momentum=v)),
    "clip": ([1e-3, 1e-1, 10.0], lambda v: optax.chain(optax.clip_by_global_norm(v), optax.sgd(0.1))),
    "cosine length": ([5.0, 10.0, 40.0], lambda v: optax.sgd(ee.sweep.rescale_schedule(COSINE, 100, v))),
}
ALONE = {"cosine length": lambda v: optax.sgd(optax.cosine_decay_schedule(0.05, v))}


def fitted(ensemble, loss, optimiser, **options):
    return ee.fit(ensemble, loss, optimiser, (X, Y), **(OPTIONS | options))


def fitted_alone(ensemble, i, loss, optimiser):
    key = ee.member_keys(KEY, 3, purpose="fit")[i : i + 1]
    return fitted(ensemble[[i]], loss, optimiser, key=key).ensemble


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: Model(0.2, key=key), 3, key=KEY)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_of_the_optimiser(ensemble, name):
    values, optimiser = OPTIMISERS[name]
    run = fitted(ensemble, loss, optimiser, hyper=jnp.asarray(values))
    for i, value in enumerate(values):
        alone = fitted_alone(ensemble, i, loss, ALONE.get(name, optimiser)(value))
        assert_close(run.ensemble[[i]], alone, 1e-5)
    assert_differ(run, values)


def test_of_the_loss(ensemble):
    weights = [0.0, 0.01, 0.3]
    run = fitted(ensemble, of_loss, optax.sgd(0.05), hyper={"weight": jnp.asarray(weights)})
    for i, weight in enumerate(weights):
        own = lambda model, batch, key, weight=weight: loss(model, batch, key, weight=weight)
        assert_close(run.ensemble[[i]], fitted_alone(ensemble, i, own, optax.sgd(0.05)), 1e-5)
    assert_differ(run, weights)


def test_of_the_model(ensemble):
    rates = [0.0, 0.3, 0.6]
    with_rate = lambda model, rate: eqx.tree_at(lambda model: model.dropout.p, model, rate)
    of_rate = lambda model, batch, key, hyper: loss(with_rate(model, hyper["rate"]), batch, key)
    run = fitted(ensemble, of_rate, optax.sgd(0.05), hyper={"rate": jnp.asarray(rates)})
    for i, rate in enumerate(rates):
        own = lambda model, batch, key, rate=rate: loss(with_rate(model, rate), batch, key)
        assert_close(run.ensemble[[i]], fitted_alone(ensemble, i, own, optax.sgd(0.05)), 1e-5)
    assert_differ(run, rates)


def assert_differ(run, values):
    """A sweep whose values reach nothing would pass any comparison with itself."""
    last = np.asarray(run.history.loss[:, -1])
    assert len(np.unique(last)) == len(values)


# Whatever the dtypes of weights and hyper-parameters, one of these gives what the Python number gives

PLAIN = {
    "sgd": lambda lr: optax.sgd(lr),
    "momentum": lambda lr: optax.sgd(0.05, momentum=lr),
    "adam": lambda lr: optax.adam(lr, b1=0.5),
    "decay": lambda lr: optax.adamw(0.01, weight_decay=lr),
    "clipped": lambda lr: optax.chain(optax.clip_by_global_norm(lr), optax.sgd(0.1)),
    "injected": lambda lr: optax.inject_hyperparams(optax.sgd)(lr),
}
DTYPES = [("bfloat16", False), ("float32", True), ("float16", False), ("float32", False), ("float64", True)]
_FIRST = [("momentum", *DTYPES[0]), ("adam", *DTYPES[0]), ("momentum", *DTYPES[1])]
_REST = [case for case in ((name, *dtype) for name in PLAIN for dtype in DTYPES) if case not in _FIRST]


def _marks(name, dtype, x64):
    return pytest.mark.slow if (dtype, x64) == ("float32", False) else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "dtype", "x64"), [*_FIRST, *(pytest.param(*case, marks=_marks(*case)) for case in _REST)]
)
def test_of_any_dtype(name, dtype, x64):
    make, values = PLAIN[name], [0.25, 0.125]  # exact in every dtype, so that one rounding is like another
    with jax.enable_x64(x64):
        rows = (jnp.ones((4, 3), dtype), jnp.zeros((4, 1), dtype))
        made = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key, dtype=jnp.dtype(dtype)), 2, key=KEY)
        mse = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
        options = {"steps": 3, "key": KEY, "plan": ee.plan.Blocks(1), "shuffle": False}
        hyper = {"value": np.asarray(values)}
        run = ee.fit(made, mse, lambda h: make(h["value"]), rows, hyper=hyper, **options)
        for i, value in enumerate(values):
            alone = ee.fit(made[[i]], mse, make(value), rows, **options).ensemble
            assert run.ensemble.stacked.weight.dtype == dtype
            for got, expected in zip(jax.tree.leaves(run.ensemble[[i]]), jax.tree.leaves(alone), strict=True):
                np.testing.assert_array_equal(np.asarray(got, float), np.asarray(expected, float))
