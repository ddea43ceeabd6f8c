"""Ids that a compiled function has computed: an array leaf, which operations on all arrays change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jnp.ones((4, 3))
KNOWN = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 3, key=KEY)
ENSEMBLE = eqx.filter_jit(lambda ensemble, index: ensemble[index])(KNOWN, jnp.arange(3))
OTHER = eqx.tree_at(lambda e: e.stacked.layers[0].bias, ENSEMBLE, jnp.ones((3, 4)))
ADAM = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it():
    """Under strict promotion the idioms would be errors of JAX."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mse(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def on(select, fn):
    """`fn` of the leaves that `select` takes, as Equinox users write it."""
    old, static = eqx.partition(ENSEMBLE, select)
    return eqx.combine(fn(old, eqx.filter(OTHER, select)), static)


CORRUPT = {
    "an average of all arrays": lambda: on(
        eqx.is_array, lambda old, new: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, old, new)
    ),
    "incremental_update of all arrays": lambda: on(
        eqx.is_array, lambda old, new: optax.incremental_update(new, old, 0.1)
    ),
    "a cast of all arrays": lambda: on(
        eqx.is_array, lambda old, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), old)
    ),
}
USES = {
    "a call": lambda e, path: e(X[0]),
    "a compiled call": lambda e, path: eqx.filter_jit(lambda e: e(X[0]))(e),
    "compiled keys": lambda e, path: eqx.filter_jit(lambda e: e.keys(KEY))(e),
    "len": lambda e, path: len(e),
    "one member": lambda e, path: e[0],
    "some members": lambda e, path: e[:2],
    "unstack": lambda e, path: e.unstack(),
    "iteration": lambda e, path: list(e),
    "keys": lambda e, path: e.keys(KEY),
    "map": lambda e, path: e.map(lambda model: model(X[0])),
    "map_members": lambda e, path: ee.map_members(lambda model: model(X[0]), plan=ee.plan.Sequential())(e),
    "average": lambda e, path: ee.average_parameters(e),
    "prune": lambda e, path: ee.prune_members(e, jnp.array([0.5, 0.5, 0.0])),
    "concatenate": lambda e, path: ee.concatenate([e, ENSEMBLE], renumber=True),
    "predict": lambda e, path: ee.predict(e, X),
    "init": lambda e, path: ee.train.init(e, ADAM, key=KEY),
    "fit": lambda e, path: ee.fit(e, mse, ADAM, X, steps=1, key=KEY),
    "polyak": lambda e, path: ee.tree.polyak(e, e, 0.1),
}


@pytest.mark.parametrize("use", USES)
def test_the_first_use_explains_what_happened(use, unhooked, tmp_path):
    for name, corrupt in CORRUPT.items():
        ensemble = corrupt()
        kind = "bfloat16[3]" if "cast" in name else "float32[3]"
        with pytest.raises(TypeError) as caught:
            USES[use](ensemble, tmp_path)
        assert str(caught.value) == (
            "`Ensemble` needs integer member ids, from which the members' random streams follow; at `.ids`: got "
            f"{kind}.\nIds that a compiled function has computed, as for a traced index, are an array among the "
            "weights, which arithmetic on all arrays changes: make them known first, by `ensemble = ensemble[:]` "
            "outside the function, or select the weights by `eqx.is_inexact_array`."
        )


def test_members_that_are_ensembles():
    make = lambda key, ids: ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), ids=ids, key=key)
    nest = ee.stack([make(KEY, [0, 1]), make(KEY, [2, 3])])
    broken = eqx.tree_at(lambda e: e.stacked.ids, nest, nest.stacked.ids * 1.0)
    with pytest.raises(TypeError, match="needs integer member ids"):
        broken(X[0])
