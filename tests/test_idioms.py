"""What Equinox users write for all arrays of a tree, with an ensemble in the place of a model.

Each idiom is run on an ensemble and on every single member, inside and outside of `filter_jit`: both must agree.
"""

import copy
import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


class Model(eqx.Module):
    """A model whose leaves are all arrays, so that `jax.tree.map` takes it as a whole."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(3, 4, key=first), eqx.nn.Linear(4, 1, key=last)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


ENSEMBLE = ee.build(Model, 3, key=KEY)
ADAM = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(tree):
    """Of a model, or summed over members, so that each member has the gradient of its own loss."""
    return jnp.sum((tree(X) - 1.0) ** 2)


def halved(tree):
    return jax.tree.map(lambda x: 0.5 * x, tree)


def plain_gradient(tree):
    arrays, static = eqx.partition(tree, eqx.is_array)
    gradient = jax.grad(lambda arrays: loss(eqx.combine(arrays, static)))(arrays)
    return eqx.combine(jax.tree.map(lambda x, g: x - 0.1 * g, arrays, gradient), static)


def filtered_gradient(tree):
    value, gradient = eqx.filter_value_and_grad(loss)(tree)
    return eqx.apply_updates(tree, jax.tree.map(lambda g: -0.1 * g, gradient))


def optimiser(tree):
    opt_state = ADAM.init(eqx.filter(tree, eqx.is_array))
    for _ in range(2):
        updates, opt_state = ADAM.update(eqx.filter_grad(loss)(tree), opt_state, eqx.filter(tree, eqx.is_array))
        tree = eqx.apply_updates(tree, updates)
    return tree


def scanned(tree):
    def step(carry, _):
        tree, opt_state = carry
        updates, opt_state = ADAM.update(jax.grad(loss)(tree), opt_state, tree)
        return (optax.apply_updates(tree, updates), opt_state), None

    return jax.lax.scan(step, (tree, ADAM.init(tree)), length=3)[0][0]


def ravelled(tree):
    flat, unravel = ravel_pytree(tree)
    return unravel(0.5 * flat)


def serialised(tree):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, halved(tree))
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, tree)


def target(tree):
    """A target network: all arrays, by `jax.tree.map`."""
    return jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, tree, halved(tree))


def checkpointed(tree):
    gradient = jax.grad(lambda tree: eqx.filter_checkpoint(lambda tree: loss(tree))(tree))(tree)
    return jax.tree.map(jnp.subtract, tree, gradient)


def of_shapes(tree):
    shapes = eqx.filter_eval_shape(halved, tree)
    return jax.tree.map(lambda shape, x: jnp.ones(shape.shape, shape.dtype) + x, shapes, tree)


def donated(tree):
    return eqx.filter_jit(halved, donate="all")(jax.tree.map(jnp.copy, tree))


IDIOMS = {
    "tree.map": halved,
    "tree.map of two": target,
    "partition and jax.grad": plain_gradient,
    "filter_value_and_grad and apply_updates": filtered_gradient,
    "jax.grad of the tree": lambda tree: jax.tree.map(jnp.add, tree, jax.grad(loss)(tree)),
    "an optimiser": optimiser,
    "filter_jvp": lambda tree: eqx.filter_jvp(halved, (tree,), (jax.tree.map(jnp.ones_like, tree),))[1],
    "lax.scan": scanned,
    "lax.fori_loop": lambda tree: jax.lax.fori_loop(0, 3, lambda _, tree: halved(tree), tree),
    "lax.cond": lambda tree: jax.lax.cond(jnp.array(1) > 0, halved, lambda tree: tree, tree),
    "filter_checkpoint": checkpointed,
    "incremental_update": lambda tree: optax.incremental_update(halved(tree), tree, 0.1),
    "periodic_update": lambda tree: optax.periodic_update(halved(tree), tree, jnp.array(4), 2),
    "ravel_pytree": ravelled,
    "tree_serialise_leaves": serialised,
    "a cast": lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree),
    "filter_eval_shape": of_shapes,
    "donation": donated,
    "tree_at": lambda tree: (
        eqx.tree_at(lambda tree: tree.last, tree, replace_fn=halved)
        if isinstance(tree, Model)
        else eqx.tree_at(lambda tree: tree.stacked.last, tree, replace_fn=halved)
    ),
    "inference_mode": lambda tree: eqx.nn.inference_mode(halved(tree)),
    "device_put": jax.device_put,
    "polyak": lambda tree: ee.tree.polyak(tree, halved(tree), 0.1),
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "deepcopy": copy.deepcopy,
}
ON_THE_HOST = {"tree_serialise_leaves", "pickle"}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom(name, compiled):
    idiom = IDIOMS[name]
    if compiled and name in ON_THE_HOST:
        pytest.skip("writes files of concrete arrays")
    got = (eqx.filter_jit(idiom) if compiled else idiom)(ENSEMBLE)
    assert jax.tree.structure(got) == jax.tree.structure(ENSEMBLE)
    for own, model in zip(got.unstack(), ENSEMBLE.unstack(), strict=True):
        for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(idiom(model)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(np.asarray(x, float), np.asarray(y, float), rtol=1e-5, atol=1e-6)


def test_a_target_beside_a_training_state():
    state = ee.train.init(ENSEMBLE, ADAM, key=KEY)
    of_state = {
        "polyak": lambda target, state: ee.tree.polyak(target, state.ensemble, 0.1),
        "optax": lambda target, state: optax.incremental_update(state.ensemble, target, 0.1),
        "tree.map": lambda target, state: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, target, state.ensemble),
        "cond": lambda target, state: jax.lax.cond(state.step.max() > 0, lambda: target, lambda: state.ensemble),
    }
    for name, fn in of_state.items():
        got = eqx.filter_jit(fn)(halved(ENSEMBLE), state)
        assert jax.tree.structure(got) == jax.tree.structure(ENSEMBLE), name
        of_one = 1.0 if name == "cond" else 0.55
        np.testing.assert_allclose(got.stacked.last.weight, of_one * ENSEMBLE.stacked.last.weight, rtol=1e-6)
    (_, hard), _ = ee.train.scan_steps(
        lambda carry, _: ((carry[0], carry[0].ensemble), None), (state, halved(ENSEMBLE)), length=2
    )
    assert eqx.tree_equal(hard, ENSEMBLE)


def test_a_program_of_the_user_is_compiled_once():
    traces = 0

    @eqx.filter_jit
    def call(ensemble, index):
        nonlocal traces
        traces += 1
        return ensemble[index](X)

    index = jnp.array([2, 0])
    for ensemble in (ENSEMBLE, halved(ENSEMBLE), ENSEMBLE[[0, 1, 2]], ENSEMBLE[::-1]):
        np.testing.assert_allclose(call(ensemble, index), ensemble(X)[index], rtol=1e-6)
    assert traces == 1


@pytest.mark.slow
def test_ensembles_of_ensembles(tmp_path):
    members = [ee.build(Model, 2, key=jax.random.key(seed)) for seed in (1, 2)]
    nest = ee.stack(members)
    ee.save(tmp_path / "nest", nest)
    joined = ee.concatenate([nest[[1]], nest[[0]]])
    made = ee.build(lambda key: ee.build(Model, 2, key=key), 2, key=KEY)
    assert jax.tree.structure(made) == jax.tree.structure(nest)
    for got in (nest, joined[::-1], ee.load(tmp_path / "nest", nest)):
        assert eqx.tree_equal(got, nest)
        np.testing.assert_allclose(got(X), jnp.stack([member(X) for member in members]), rtol=1e-6)
        for own, other in zip(got.unstack(), members, strict=True):
            assert eqx.tree_equal(own, other)
