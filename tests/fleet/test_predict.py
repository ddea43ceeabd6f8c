"""Predictions and functions of members in shards are those of one call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .executors import Here

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 4, 4, 1, key=key), 7, key=KEY)
WEIGHTS = np.array([0.3, 0, 0.1, 0.2, 0.1, 0.1, 0.2], np.float32)
PAIR = lambda model, x: (model(x)[:1], jnp.exp(model(x)[1:2]))

CALLS = {
    "all": {},
    "small batches": {"batch_size": 5},
    "a mixture": {"combine": ee.combine.mixture},
    "a weighted mixture": {"combine": ee.combine.mixture, "weights": WEIGHTS},
    "weights below float32": {"combine": ee.combine.mixture, "weights": WEIGHTS * np.float64(1e-50)},
    "weights above float32": {"combine": ee.combine.moments, "weights": WEIGHTS * np.float64(1e50)},
    "entropies": {"combine": ee.uncertainty.decompose_entropy, "batch_size": 5},
    "a pair": {"combine": ee.combine.gaussian, "fn": PAIR},
    "no streaming form": {"combine": ee.combine.median},
    "weights of rows": {"combine": ee.combine.mean, "weights": np.outer(WEIGHTS, np.ones(23, np.float32))},
    "keys": {"fn": lambda model, x, key: model(x) + jax.random.normal(key, (4,)), "key": KEY, "inference": False},
}


@pytest.mark.parametrize("name", CALLS)
def test_predict(name):
    options = CALLS[name]
    if "key" in options:
        options = options | {"fn": lambda model, x, *, key: model(x) + jax.random.normal(key, (4,))}
    expected = ee.predict(ENSEMBLE, X, **options)
    found = ee.fleet.predict(Here(), ENSEMBLE, X, shard=3, **options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


class Spread(ee.combine.AbstractCombination):
    """One number for all rows."""

    def update(self, partial, predictions, *, weights=None):
        return self.merge(partial, jnp.max(jnp.abs(predictions)))

    def merge(self, first, second):
        return second if first is None else jnp.maximum(first, second)

    def finish(self, partial):
        return partial


@pytest.mark.parametrize(
    ("combine", "shape"), [(jnp.mean, r"\(\)"), (lambda p: p[:, 0], r"\(7, 4\)"), (Spread(), r"\(\)")]
)
def test_results_that_are_not_rows(combine, shape):
    message = rf"needs a `combine` that .* it gave {shape} for"
    with pytest.raises(ValueError, match=f"`predict` {message}"):
        ee.predict(ENSEMBLE, X, combine=combine)
    with pytest.raises(ValueError, match=f"`fleet.predict` {message} 23 rows"):
        ee.fleet.predict(Here(), ENSEMBLE, X, combine=combine)


def test_inputs_of_each_member():
    own = np.stack([X + i for i in range(7)])
    found = ee.fleet.predict(Here(), ENSEMBLE, ee.Each(own), shard=2)
    np.testing.assert_allclose(found, ee.predict(ENSEMBLE, ee.Each(own)), rtol=1e-5, atol=1e-6)


def test_states():
    def make(key):
        return eqx.nn.make_with_state(
            lambda: eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=key), eqx.nn.BatchNorm(4, "b", mode="ema")])
        )()

    ensemble, state = ee.build(make, 5, key=KEY)
    with jax.numpy_dtype_promotion("standard"):
        expected = ee.predict(ensemble, X, state=state)
        found = ee.fleet.predict(Here(), ensemble, X, state=state, shard=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_members_that_are_missing():
    """Predictions without some members would be those of others at their positions."""
    with pytest.raises(Exception, match="a worker died") as caught:
        ee.fleet.predict(Here(kills=[1]), ENSEMBLE, X, shard=2)
    assert "without the members" in "\n".join(caught.value.__notes__)


def test_map_members():
    def fn(model, x, scale, *, shift):
        return {"out": scale * jax.vmap(model)(x) + shift, "name": "fixed", "model": model}

    large = np.tile(X, (400, 1))
    args, kwargs = (ENSEMBLE, large, ee.Each(jnp.arange(7.0))), {"shift": 3.0}
    executor = Here()
    found = ee.fleet.map_members(executor, fn, shard=3)(*args, **kwargs)
    expected = ee.map_members(fn)(*args, **kwargs)
    assert found["name"] == "fixed"
    np.testing.assert_allclose(found["out"], expected["out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["model"].ids, ENSEMBLE.ids)
    assert max(len(part) for call in executor.calls for part in call if isinstance(part, bytes)) < large.nbytes / 5


def test_what_map_members_refuses():
    call = ee.fleet.map_members(Here(), lambda x: x)
    with pytest.raises(TypeError, match="needs an argument with members"):
        call(jnp.ones(3))
    with pytest.raises(ee.MemberMismatchError, match="one number of members"):
        call(ee.Each(jnp.ones(3)), ENSEMBLE)


class Opaque:
    """Not equal to its copies."""

    def __init__(self):
        self.power = 2


class Tagged(eqx.Module):
    weight: jax.Array
    tag: object = eqx.field(static=True)


@pytest.mark.parametrize("tag", [Opaque(), [Opaque()], object(), float("nan")])
def test_results_with_static_fields_that_are_equivalent(tag):
    """Each shard returns a copy of its own."""
    ensemble = ee.build(lambda key: Tagged(jax.random.normal(key, (3,)), tag), 4, key=jax.random.key(0))
    found = ee.fleet.map_members(Here(), lambda model: model, shard=2)(ensemble)
    np.testing.assert_array_equal(found.stacked.weight, ensemble.stacked.weight)
    assert type(found.stacked.tag) is type(tag)


@pytest.mark.slow
def test_fit_with_a_static_field_of_nan():
    ensemble = ee.build(lambda key: Tagged(jax.random.normal(key, (3,)), float("nan")), 4, key=jax.random.key(0))
    arguments = lambda model, batch, key: jnp.mean((batch @ model.weight) ** 2), optax.sgd(0.1), jnp.ones((8, 3))
    options = {"steps": 1, "plan": ee.plan.Sequential(), "key": jax.random.key(0)}
    expected = ee.fit(ensemble, *arguments, **options)
    found = ee.fleet.fit(Here(), ensemble, *arguments, shard=2, **options)
    np.testing.assert_array_equal(found.history.loss, expected.history.loss)


def test_results_with_static_fields_that_differ():
    values = iter(range(9))
    fn = lambda model: Tagged(model.weight, next(values))
    ensemble = ee.build(lambda key: Tagged(jax.random.normal(key, (3,)), 0), 4, key=jax.random.key(0))
    with pytest.raises(
        ee.MemberMismatchError, match=r"`fleet.map_members` needs ensembles of the same kind(.|\n)*`\.tag`: expected 0"
    ):
        ee.fleet.map_members(Here(), fn, shard=2)(ensemble)
