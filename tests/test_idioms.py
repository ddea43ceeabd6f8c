"""What Equinox users write for all arrays of a tree, with an ensemble in the place of a model.

Each idiom is run on an ensemble and on every single member, inside and outside of `filter_jit`: both must agree, and
the ids must be those of before.
"""

import copy
import dataclasses
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
IDS = [3, 0, 7]


class Model(eqx.Module):
    """A model whose leaves are all arrays, so that `jax.tree.map` takes it as a whole."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(3, 4, key=first), eqx.nn.Linear(4, 1, key=last)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


ENSEMBLE = ee.build(Model, ids=IDS, key=KEY)
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


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom(name, compiled):
    idiom = IDIOMS[name]
    if compiled and name in ON_THE_HOST:
        pytest.skip("writes files of concrete arrays")
    got = (eqx.filter_jit(idiom) if compiled else idiom)(ENSEMBLE)
    assert jax.tree.structure(got) == jax.tree.structure(ENSEMBLE)
    assert isinstance(got.ids, jax.Array)
    assert got.ids.dtype == jnp.int32
    assert got.ids.tolist() == IDS
    for own, model in zip(got.unstack(), ENSEMBLE.unstack(), strict=True):
        for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(idiom(model)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(np.asarray(x, float), np.asarray(y, float), rtol=1e-5, atol=1e-6)


def test_the_ids_are_no_leaf():
    assert len(jax.tree.leaves(ENSEMBLE)) == 4
    assert len(jax.tree.leaves(ADAM.init(ENSEMBLE))) == 2 * 4 + 1
    assert eqx.filter_grad(loss)(ENSEMBLE).ids.tolist() == IDS
    assert eqx.filter(ENSEMBLE, eqx.is_array, inverse=True).ids.tolist() == IDS


def test_other_members_are_another_structure():
    with pytest.raises(ValueError, match="Ids"):
        jax.tree.map(jnp.add, ENSEMBLE, ENSEMBLE[::-1])


@eqx.filter_jit
def taken(ensemble, index):
    return ensemble[index]


def test_ids_that_are_computed_are_a_leaf():
    got = taken(ENSEMBLE, jnp.array([2, 0]))
    assert got.ids.tolist() == [7, 3]
    assert len(jax.tree.leaves(got)) == 5
    assert len(jax.tree.leaves(got[:])) == 4  # known from here on
    assert jax.tree.structure(got[:]) == jax.tree.structure(ENSEMBLE[[2, 0]])
    np.testing.assert_array_equal(got(X), ENSEMBLE(X)[np.array([2, 0])])


def test_ids_are_known_while_a_program_is_traced():
    @eqx.filter_jit
    def call(ensemble):
        assert ensemble.ids.tolist() == IDS
        made = ee.build(Model, ids=ensemble.ids, key=KEY)
        assert np.asarray(made.ids).tolist() == IDS
        assert ee.train.init(made, ADAM, key=KEY).ids.tolist() == IDS
        return made, ensemble.ids[jnp.argmin(ensemble.ids)]

    made, least = call(ENSEMBLE)
    assert jax.tree.structure(made) == jax.tree.structure(ENSEMBLE)
    assert least == 0
    assert eqx.filter_eval_shape(lambda key: ee.build(Model, 3, key=key), KEY).ids.tolist() == [0, 1, 2]


def test_a_target_beside_a_training_state():
    """The ids of a training state are part of its structure too."""
    state = ee.train.init(ENSEMBLE, ADAM, key=KEY)
    of_state = {
        "polyak": lambda target, state: ee.tree.polyak(target, state.ensemble, 0.1),
        "optax": lambda target, state: optax.incremental_update(state.ensemble, target, 0.1),
        "tree.map": lambda target, state: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, target, state.ensemble),
        "cond": lambda target, state: jax.lax.cond(state.step > 0, lambda: target, lambda: state.ensemble),
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
    assert state[::-1].ensemble.ids.tolist() == IDS[::-1]


def test_a_program_of_the_user_is_compiled_for_the_ids():
    traces = 0

    @eqx.filter_jit
    def call(ensemble):
        nonlocal traces
        traces += 1
        return ensemble(X)

    for ensemble in (ENSEMBLE, halved(ENSEMBLE), ENSEMBLE[[0, 1, 2]], ENSEMBLE[::-1], ENSEMBLE):
        call(ensemble)
    assert traces == 2

    @eqx.filter_jit
    def call_parts(stacked, ids):
        nonlocal traces
        traces += 1
        return ee.Ensemble(stacked, ENSEMBLE.shared, ids).ids

    for ensemble in (ENSEMBLE, ENSEMBLE[::-1]):
        assert call_parts(ensemble.stacked, ensemble.ids).tolist() == ensemble.ids.tolist()
    assert traces == 3


def mse(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def counted(fn):
    """`fn`, and a list that grows whenever it is traced."""
    seen = []
    return lambda *args: (seen.append(1), fn(*args))[1], seen


ROWS = jnp.ones((8, 3))


def of_fit(ensemble, loss):
    return ee.fit(ensemble, loss, ADAM, ROWS, steps=2, batch_size=4, key=KEY).ensemble


def of_step(ensemble, loss):
    STEPS.setdefault(loss, ee.train.make_step(loss, ADAM))
    return STEPS[loss](ee.train.init(ensemble, ADAM, key=KEY), ROWS)[0].ensemble


def of_scan(ensemble, loss):
    STEPS.setdefault(loss, ee.train.make_step(loss, ADAM))
    state = ee.train.init(ensemble, ADAM, key=KEY)
    return ee.train.scan_steps(STEPS[loss], state, jnp.stack([ROWS, ROWS]))[0].ensemble


STEPS = {}
OWN = {
    "scan_steps": (mse, of_scan),
    "fit": (mse, of_fit),
    "make_step": (mse, of_step),
    "predict": (lambda model, x: model(x), lambda e, fn: ee.predict(e, ROWS, fn=fn)),
    "predict of many rows": (lambda model, x: model(x), lambda e, fn: ee.predict(e, ROWS, fn=fn, batch_size=4)),
    "map_members": (lambda model, x: model(x), lambda e, fn: ee.map_members(fn, plan=ee.plan.Sequential())(e, X)),
}


@pytest.mark.parametrize("name", OWN)
def test_programs_of_the_library_are_not(name):
    fn, use = OWN[name]
    fn, seen = counted(fn)
    use(ENSEMBLE, fn)
    first = len(seen)
    assert first > 0
    for other in (ENSEMBLE[::-1], ee.build(Model, ids=[4, 5, 6], key=KEY)):
        got = use(other, fn)
        if isinstance(got, ee.Ensemble):
            assert jax.tree.structure(got) == jax.tree.structure(other)
    assert len(seen) == first


def test_many_ids_are_hashed_once():
    """Structures are hashed and compared in every call of a compiled function."""
    ids = vars(ee.from_stacked({"x": jnp.ones((100_000, 1))}))["ids"]
    same = pickle.loads(pickle.dumps(ids))
    assert hash(same) == hash(ids)
    assert same == ids
    assert not ids.values.flags.writeable
    assert repr(ids) == "Ids([    0,     1,     2, ..., 99997, 99998, 99999])"


@pytest.mark.parametrize("others", [[0, 1], [5, 2]], ids=["the same ids", "other ids"])
def test_ensembles_of_ensembles(others, tmp_path):
    first, second = ee.build(Model, ids=[0, 1], key=KEY), ee.build(Model, ids=others, key=jax.random.key(1))
    nest = ee.stack([first, second], ids=IDS[:2])
    assert len(jax.tree.leaves(nest)) == (4 if others == [0, 1] else 5)
    members = [first, second]
    joined = ee.concatenate([nest[[1]], nest[[0]]])
    ee.save(tmp_path / "nest", nest)
    for got in (nest, joined[::-1], ee.load(tmp_path / "nest", nest), ee.tree.take(nest, [0, 1])):
        assert got.ids.tolist() == IDS[:2]
        assert jax.tree.structure(got) == jax.tree.structure(nest)
        for own, other in zip(got.unstack(), members, strict=True):
            assert jax.tree.structure(own) == jax.tree.structure(other)
            np.testing.assert_array_equal(own(X), other(X))
    assert ee.tree.stack(members).ids.shape == (2, 2)
    for own, other in zip(ee.tree.unstack(ee.tree.stack(members)), members, strict=True):
        assert jax.tree.structure(own) == jax.tree.structure(other)


def test_three_levels(tmp_path):
    make = lambda ids, seed: ee.build(lambda key: ee.build(Model, ids=ids, key=key), 2, key=jax.random.key(seed))
    for inner in ([0, 1], [4, 5]):
        members = [make([0, 1], 0), make(inner, 1)]
        nest = ee.stack(members)
        assert len(jax.tree.leaves(nest)) == (4 if inner == [0, 1] else 5)
        ee.save(tmp_path / "nest", nest)
        for got in (nest, ee.load(tmp_path / "nest", nest), nest[::-1][::-1], ee.concatenate([nest[:1], nest[1:]])):
            assert jax.tree.structure(got) == jax.tree.structure(nest)
            assert got[1][0].ids.tolist() == inner
            np.testing.assert_allclose(got(X), jnp.stack([member(X) for member in members]), rtol=1e-6)


def test_ids_are_replaced():
    other = dataclasses.replace(ENSEMBLE, ids=jnp.array([1, 2, 3]))
    assert other.ids.tolist() == [1, 2, 3]
    assert jax.tree.structure(other) == jax.tree.structure(ee.build(Model, ids=[1, 2, 3], key=KEY))
