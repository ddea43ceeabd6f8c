"""Models whose constants are equal by `==`, but of another type or sign of zero, have programs of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._compiled import program_key

KEY = jax.random.key(0)
PAIRS = [(4, 4.0), (True, 1), (0.0, -0.0), (2.0, 2 + 0j)]


class Leaf(eqx.Module):
    """With a constant that is a leaf."""

    weight: jax.Array
    constant: object

    def __call__(self, x):
        return self.weight * x + code(self.constant)


class Static(eqx.Module):
    """With a constant in a static field."""

    weight: jax.Array
    constants: tuple = eqx.field(static=True)

    def __init__(self, weight, constant):
        self.weight, self.constants = weight, (("a text", constant),)

    def __call__(self, x):
        return self.weight * x + code(self.constants[0][1])


CODES = {bool: 1.0, int: 2.0, float: 3.0, complex: 4.0}


def code(constant):
    """A number that tells types and signs apart."""
    return CODES[type(constant)] + 10.0 * np.signbit(np.real(constant))


def code_seen(model, x):
    return model(jnp.zeros_like(x))


def ensembles(kind, pair):
    return [ee.stack([kind(jnp.full(1, float(w)), constant) for w in range(2)]) for constant in pair]


def loss_of(model, x, key):
    return jnp.mean(jax.vmap(code_seen, in_axes=(None, 0))(model, x)) + jnp.sum(model.weight * 0)


def fit(ensemble):
    x = np.ones((6, 1), np.float32)
    return ee.fit(ensemble, loss_of, OPTIMISER, x, steps=2, batch_size=2, key=KEY).history.loss[0, 0]


def fit_validation(ensemble):
    x = np.ones((6, 1), np.float32)
    options = {"validation": ee.train.Validation(x, score=loss_of, mode="min")}
    run = ee.fit(ensemble, zero_loss, OPTIMISER, x, epochs=1, batch_size=3, key=KEY, **options)
    return run.history.validation[0, 0]


def zero_loss(model, x, key):
    return jnp.sum(model.weight * 0)


def fit_batches(ensemble):
    batches = iter([np.ones((2, 1), np.float32)] * 2)
    return ee.fit(ensemble, loss_of, OPTIMISER, batches, steps=2, key=KEY).history.loss[0, 0]


def loss_with_callback(model, x, key):
    jax.debug.callback(lambda: None)
    return loss_of(model, x, key)


def steps(ensemble, name):
    state = ee.train.init(ensemble, OPTIMISER, key=KEY)
    return STEPS[name](state, jnp.ones((2, 1)))[1].loss[0]


OPTIMISER = optax.sgd(0.1)
STEPS = {
    "plain": ee.train.make_step(loss_of, OPTIMISER),
    "with a callback": ee.train.make_step(loss_with_callback, OPTIMISER),
}
MAPPED = ee.map_members(code_seen, plan=ee.plan.Sequential())
USES = {
    "fit": fit,
    "fit, validation": fit_validation,
    "fit, batches": fit_batches,
    **{f"make_step, {name}": lambda ensemble, name=name: steps(ensemble, name) for name in STEPS},
    "predict": lambda ensemble: ee.predict(ensemble, np.ones((5, 1), np.float32), fn=code_seen, batch_size=2)[0, 0, 0],
    "map_members": lambda ensemble: MAPPED(ensemble, np.ones(1, np.float32))[0, 0],
}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("kind", [Leaf, Static])
@pytest.mark.parametrize("use", USES)
def test_each_constant_is_seen(use, kind, pair):
    found = [float(USES[use](ensemble)) for ensemble in ensembles(kind, pair)]
    assert found == [code(x) for x in pair]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_few_rows(pair):
    """Of a leaf; static fields that are equal share a program, as in `jax.jit`."""
    x = np.ones((2, 1), np.float32)
    found = [float(ee.predict(ensemble, x, fn=code_seen)[0, 0, 0]) for ensemble in ensembles(Leaf, pair)]
    assert found == [code(x) for x in pair]


def test_equal_models_share_a_program(compiled):
    fit(ensembles(Static, (4, 4.0))[0])
    again = ensembles(Static, (4, 4.0))
    with compiled() as names:
        fit(again[0])
    assert not names


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_kinds(pair):
    for wrap in (lambda x: x, lambda x: {"a": [x, "text"]}, lambda x: Static(jnp.ones(1), x), lambda x: {x: 1.0}):
        first, second = map(wrap, pair)
        assert program_key(first) != program_key(second)
        assert program_key(first) == program_key(wrap(pair[0]))
        hash(program_key(first))
    assert program_key((1, 2.0)) != program_key((1.0, 2))
    assert program_key((jnp.ones(2), None, "text", jnp.tanh)) == (None,)
