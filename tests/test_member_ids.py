"""Other libraries' operations on all leaves of an ensemble, and their effect on the members' ids."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jnp.ones((4, 3))
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 3, key=KEY)
OTHER = eqx.tree_at(lambda e: e.stacked.layers[0].bias, ENSEMBLE, jnp.ones((3, 4)))
ADAM = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it():
    """Under strict promotion the idioms would be errors of JAX."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(ensemble):
    return jnp.sum(ensemble(X[0]) ** 2)


def mse(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def on(select, fn):
    """`fn` of the leaves that `select` takes, as Equinox users write it."""
    old, static = eqx.partition(ENSEMBLE, select)
    return eqx.combine(fn(old, eqx.filter(OTHER, select)), static)


def trained(*, compiled):
    def step(ensemble, opt_state):
        gradient = eqx.filter_grad(loss)(ensemble)
        updates, opt_state = ADAM.update(gradient, opt_state, eqx.filter(ensemble, eqx.is_inexact_array))
        return eqx.apply_updates(ensemble, updates), opt_state

    opt_state = ADAM.init(eqx.filter(ENSEMBLE, eqx.is_inexact_array))
    return (eqx.filter_jit(step) if compiled else step)(ENSEMBLE, opt_state)[0]


# What leaves ids alone: nothing of ours is needed.
GOOD = {
    "a step of optax": lambda: trained(compiled=False),
    "a compiled step of optax": lambda: trained(compiled=True),
    "incremental_update of the weights": lambda: on(
        eqx.is_inexact_array, lambda old, new: optax.incremental_update(new, old, 0.1)
    ),
    "tree.map over the weights": lambda: on(eqx.is_inexact_array, lambda old, _: jax.tree.map(lambda x: 0.9 * x, old)),
    "a cast of the weights": lambda: on(
        eqx.is_inexact_array, lambda old, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), old)
    ),
    "periodic_update of all arrays": lambda: on(
        eqx.is_array, lambda old, new: optax.periodic_update(new, old, jnp.array(4), 2)
    ),
    "a copy of all arrays": lambda: on(eqx.is_array, lambda old, _: jax.tree.map(jnp.copy, old)),
    "devices": lambda: on(eqx.is_array, lambda old, _: jax.device_put(old)),
    "polyak": lambda: ee.tree.polyak(ENSEMBLE, OTHER, 0.1),
}


@pytest.mark.parametrize("name", GOOD)
def test_ids_are_left_alone(name):
    ensemble = GOOD[name]()
    assert ensemble.ids.dtype == jnp.int32
    np.testing.assert_array_equal(ensemble.ids, ENSEMBLE.ids)
    assert ensemble[1:].num_members == 2


# What makes numbers of them.
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
    "average": lambda e, path: ee.average(e),
    "prune": lambda e, path: ee.prune(e, jnp.array([0.5, 0.5, 0.0])),
    "concatenate": lambda e, path: ee.concatenate([e, ENSEMBLE], renumber=True),
    "predict": lambda e, path: ee.predict(e, X),
    "init": lambda e, path: ee.train.init(e, ADAM, key=KEY),
    "fit": lambda e, path: ee.fit(e, mse, ADAM, X, steps=1, key=KEY),
    "save": lambda e, path: ee.save(path / "saved", {"target": e}),
    "polyak": lambda e, path: ee.tree.polyak(e, e, 0.1),
    "a field of a Module": lambda e, path: ee.save(path / "saved", Field(e)),
}


class Field(eqx.Module):
    ensemble: ee.Ensemble


@pytest.mark.parametrize("use", USES)
def test_the_first_use_explains_what_happened(use, unhooked, tmp_path):
    for name, corrupt in CORRUPT.items():
        ensemble = corrupt()
        kind = "bfloat16[3]" if "cast" in name else "float32[3]"
        with pytest.raises(TypeError) as caught:
            USES[use](ensemble, tmp_path)
        assert str(caught.value) == (
            "`Ensemble` needs integer member ids, from which the members' random streams follow; at `.ids`: got "
            f"{kind}.\nArithmetic on all arrays of an ensemble changes its ids too: select the weights alone, with "
            "`eqx.partition(ensemble, eqx.is_inexact_array)` or `eqx.filter`. For a moving average of ensembles write "
            "`tree.polyak(old, new, tau)`."
        )


def test_members_that_are_ensembles():
    nest = ee.build(lambda key: ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key), 3, key=KEY)
    broken = eqx.tree_at(lambda e: e.stacked.ids, nest, nest.stacked.ids * 1.0)
    with pytest.raises(TypeError, match="needs integer member ids"):
        broken(X[0])
    with pytest.raises(TypeError, match="needs integer member ids"):
        ee.save("never written", broken)


def test_gradients_have_none():
    gradient = eqx.filter_grad(loss)(ENSEMBLE)
    assert gradient.ids is None
    assert gradient.num_members == 3
    assert eqx.filter(gradient[1], eqx.is_array).layers[0].weight.shape == (4, 3)
