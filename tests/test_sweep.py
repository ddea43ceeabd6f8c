"""Grids, the laws of draws, and members of a sweep beside single runs with their values as constants."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.sweep import AbstractRange, Choice, LogUniform, Uniform, draw, grid

from .factories import assert_close, mse
from .marking import slow_but

KEY = jax.random.key(0)


def test_a_grid_is_the_product():
    values = {"lr": [0.1, 0.2], "wd": [0.0, 1.0, 2.0], "depth": [3]}
    hyper = grid(values)
    rows = list(zip(*(hyper[name].tolist() for name in values), strict=True))
    np.testing.assert_allclose(rows, list(itertools.product(*values.values())), rtol=1e-7)
    assert hyper["depth"].dtype == jnp.int32
    betas = grid({"betas": [[0.9, 0.99], [0.8, 0.9]], "lr": [1.0, 2.0, 3.0]})["betas"]
    np.testing.assert_array_equal(betas, np.repeat(np.float32([[0.9, 0.99], [0.8, 0.9]]), 3, axis=0))


RANGES = {"lr": LogUniform(1e-4, 1e-1), "momentum": Uniform(0.5, 1.0), "units": Choice([16, 32, 64])}


def test_draws_follow_their_laws():
    """Kolmogorov's distance of 4,000 draws is above 0.042 with probability below 1e-6."""
    hyper = draw(RANGES, 4000, key=KEY)
    uniform = np.log(np.asarray(hyper["lr"]) / 1e-4) / np.log(1e3), np.asarray(hyper["momentum"]) * 2 - 1
    for values in uniform:
        assert np.abs(np.sort(values) - (np.arange(4000) + 0.5) / 4000).max() < 0.042
    counts = np.array([(np.asarray(hyper["units"]) == units).sum() for units in (16, 32, 64)])
    assert np.abs(counts - 4000 / 3).max() < 150  # five standard deviations
    assert abs(np.corrcoef(*uniform)[0, 1]) < 0.08  # names are independent: five standard deviations


class Normal(AbstractRange):
    def draw(self, generator):
        return generator.normal()

    def rescale(self, value, factor):
        return value * factor


@pytest.mark.slow
def test_a_range_of_the_users_own():
    values = np.sort(draw({"shift": Normal()}, 4000, key=KEY)["shift"])
    assert np.abs(jax.scipy.stats.norm.cdf(values) - (np.arange(4000) + 0.5) / 4000).max() < 0.042  # as above
    explore = ee.methods.population.perturb_hyper({"shift": Normal()}, resample=0.0, factors=(2.0, 2.0))
    assert explore({"shift": jnp.array(-1.5)}, KEY) == {"shift": -3.0}


def test_more_members_and_more_names_change_nothing():
    few, many = draw({"lr": RANGES["lr"]}, 5, key=KEY), draw(RANGES, 50, key=KEY)
    np.testing.assert_array_equal(few["lr"], many["lr"][:5])
    assert len(np.unique(many["lr"])) == 50


X = jax.random.normal(KEY, (24, 3))
DATA = X, jnp.sin(X[:, :1])
COSINE = optax.cosine_decay_schedule(0.05, 100)


def shifted(model, batch, key, hyper):
    return mse(eqx.tree_at(lambda m: m.layers[0].bias, model, replace_fn=lambda b: b + hyper), batch, key)


def penalised(model, batch, key, hyper):
    return mse(model, batch, key) + hyper * jnp.sum(model.layers[0].weight ** 2)


# Values, and what is a function of the value, which for one model is a Python number: the optimiser or the loss.
SWEPT = {
    "adamw lr": ([1e-3, 1e-2, 3e-2], optax.adamw),
    "adamw b1": ([0.0, 0.5, 0.9], lambda v: optax.adamw(1e-2, b1=v)),
    "adamw weight decay": ([0.0, 0.1, 1.0], lambda v: optax.adamw(1e-2, weight_decay=v)),
    "sgd momentum": ([0.0, 0.5, 0.9], lambda v: optax.sgd(1e-2, momentum=v)),
    "injected": ([1e-3, 1e-2, 1e-1], lambda v: optax.inject_hyperparams(optax.sgd)(v)),
    "clip": ([1e-3, 1e-1, 10.0], lambda v: optax.chain(optax.clip_by_global_norm(v), optax.sgd(0.1))),
    "cosine length": ([5.0, 10.0, 40.0], lambda v: optax.sgd(lambda step: COSINE(step * (100 / v)))),
    "loss": ([0.0, 0.01, 0.3], penalised),
    "model": ([0.0, 0.01, 0.3], shifted),
}
ALONE = {"cosine length": lambda v: optax.sgd(optax.cosine_decay_schedule(0.05, v))}


@pytest.mark.parametrize("name", slow_but(["clip", "loss"], SWEPT))
def test_members_are_single_runs_with_their_values(name):
    values, of = SWEPT[name]
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 3, key=KEY)
    options = {"epochs": 5, "batch_size": 8, "progress": False}
    loss, optimiser = (of, optax.sgd(0.05)) if name in ("loss", "model") else (mse, of)
    run = ee.fit(ensemble, loss, optimiser, DATA, hyper=jnp.asarray(values), key=KEY, **options)
    keys = ee.member_keys(KEY, 3, purpose="fit")
    for i, value in enumerate(values):
        if loss is mse:
            own = mse, ALONE.get(name, of)(value)
        else:
            own = (lambda model, batch, key, value=value: loss(model, batch, key, value)), optimiser
        alone = ee.fit(ensemble[[i]], *own, DATA, key=keys[i : i + 1], **options)
        assert_close(run.ensemble[[i]], alone.ensemble, 1e-5)
    assert len(np.unique(run.history.loss[:, -1])) == len(values)  # values that reach nothing would pass


PLAIN = {
    "momentum": lambda lr: optax.sgd(0.05, momentum=lr),
    "adam": lambda lr: optax.adam(lr, b1=0.5),
    "clipped": lambda lr: optax.chain(optax.clip_by_global_norm(lr), optax.sgd(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("dtype", "x64"), [("bfloat16", False), ("float64", True)])
def test_of_any_dtype(name, dtype, x64):
    """Whatever the dtypes of weights and hyper-parameters, one of these gives what the Python number gives."""
    make, values = PLAIN[name], [0.25, 0.125]  # exact in every dtype, so that one rounding is like another
    with jax.enable_x64(x64):
        rows = (jnp.ones((4, 3), dtype), jnp.zeros((4, 1), dtype))
        made = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key, dtype=jnp.dtype(dtype)), 2, key=KEY)
        options = {"steps": 3, "key": KEY, "plan": ee.plan.Blocks(1), "shuffle": False}
        run = ee.fit(made, mse, lambda h: make(h["value"]), rows, hyper={"value": np.asarray(values)}, **options)
        for i, value in enumerate(values):
            alone = ee.fit(made[[i]], mse, make(value), rows, **options).ensemble
            assert run.ensemble.stacked.weight.dtype == dtype
            for got, expected in zip(jax.tree.leaves(run.ensemble[[i]]), jax.tree.leaves(alone), strict=True):
                np.testing.assert_array_equal(np.asarray(got, float), np.asarray(expected, float))
