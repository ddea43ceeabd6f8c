import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 2))
RATE = jnp.array([0.1, 0.2])


def mse(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def weighted(model, batch, key, hyper):
    return hyper["weight"] * mse(model, batch, key)


def sgd(hyper):
    return optax.sgd(hyper["lr"])


def in_state(hyper):
    return optax.inject_hyperparams(optax.adam)(hyper["lr"])


def in_schedule(hyper):
    return optax.sgd(optax.cosine_decay_schedule(0.1, 10, hyper["lr"]))


def line_search(hyper):
    return optax.chain(optax.scale(hyper["lr"]), optax.scale_by_backtracking_linesearch(3))


def found(loss, optimiser, names, **options):
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
    hyper = dict.fromkeys(names, RATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ee.fit(ensemble, loss, optimiser, X, steps=2, hyper=hyper, key=KEY, **options)
    return [str(warning.message) for warning in caught]


def text(words):
    return f"`fit` got {words} in `hyper`, but neither the optimiser nor the loss uses it: is the name misspelt?"


@pytest.mark.parametrize("optimiser", [sgd, in_state, in_schedule, line_search])
@pytest.mark.parametrize("loss", [mse, weighted])
def test_a_name_that_nothing_uses(loss, optimiser):
    names = ["lr", "weight"] if loss is weighted else ["lr"]
    assert found(loss, optimiser, names) == []
    assert found(loss, optimiser, [*names, "weigth"]) == [text("`weigth`")]
    assert found(loss, optimiser, ["a", *names, "b"]) == [text("`a`, `b`")]


def test_a_plain_optimiser():
    assert found(weighted, optax.sgd(0.1), ["weight"]) == []
    assert found(weighted, optax.sgd(0.1), ["weight", "lr"]) == [text("`lr`")]


def test_a_score_uses_it():
    options = {"validation": ee.train.Validation(X + 1, score=weighted, mode="min")}
    assert found(mse, sgd, ["lr", "weight"], **options) == []


class Dropped(eqx.Module):
    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x):
        return self.layer(self.dropout(x, inference=True))


@pytest.mark.parametrize("built_with", [[0.1, 0.2], [0.1, 0.3]])
def test_what_members_were_built_with_is_used(built_with):
    """Their values in `hyper` are for the table and for searches."""
    make = lambda key, p: Dropped(eqx.nn.Linear(2, 1, key=key), eqx.nn.Dropout(p))
    ensemble = ee.build(make, zip={"p": jnp.array(built_with)}, key=KEY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ee.fit(ensemble, mse, sgd, X, steps=2, hyper={"lr": RATE, "p": RATE}, key=KEY)
    assert [str(warning.message) for warning in caught] == ([] if built_with == [0.1, 0.2] else [text("`p`")])


def test_the_path_of_a_nested_name():
    nested = lambda hyper: optax.sgd(hyper["sgd"]["lr"])
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
    hyper = {"sgd": {"lr": RATE, "momentum": RATE}}
    with pytest.warns(UserWarning, match="got `sgd.momentum` in `hyper`"):
        ee.fit(ensemble, mse, nested, X, steps=2, hyper=hyper, key=KEY)


def test_a_score_needs_its_direction():
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
    with pytest.raises(TypeError, match="`train.Validation` needs `mode` with `score`"):
        ee.fit(ensemble, mse, optax.sgd(0.1), X, steps=2, validation=ee.train.Validation(X, score=mse), key=KEY)
