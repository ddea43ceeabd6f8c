"""Errors for what stacking adds, before anything is traced; each of at most four lines."""

import functools as ft
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY, MEMBERS = jax.random.key(5), 4
X = np.ones((8, 3), np.float32)
Y = np.zeros(8, np.float32)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def fit(data=(X, Y), optimiser=None, loss=loss, **options):
    return ee.fit(ensemble(), loss, optimiser or optax.sgd(1e-2), data, **({"epochs": 1, "key": KEY} | options))


WRONG = {
    "members' targets without a mark": (lambda: fit((X, np.zeros((MEMBERS, 8)))), ValueError, "as `Each`"),
    "an Each of other members": (lambda: fit((X, ee.Each(np.zeros((3, 8))))), ValueError, r"needs \(4, rows, ...\)"),
    "rows of other members": (lambda: fit(rows=np.zeros((3, 8), int)), ValueError, r"indices \(4, n\)"),
    "rows that do not exist": (lambda: fit(rows=np.full((MEMBERS, 8), 8)), IndexError, r"\[0, 8\)"),
    "keys of other members": (lambda: fit(key=jax.random.split(KEY, 3)), ValueError, r"one per member \(4,\)"),
    "no key": (lambda: fit(key=None), TypeError, "key=jax.random.key"),
    "a key of another generator": (lambda: fit(key=jax.random.key(0, impl="rbg")), TypeError, "threefry"),
    "hyper of other members": (
        lambda: fit(optimiser=lambda h: optax.sgd(h), hyper=jnp.ones(3)), ValueError, r"expected \(4, ...\)",
    ),
    "one rate per member in the optimiser": (
        lambda: fit(optimiser=optax.sgd(jnp.full(MEMBERS, 0.1))), (ValueError, TypeError), "4",
    ),
    "a function of no hyper-parameters": (lambda: fit(optimiser=optax.adam), TypeError, "needs `hyper=`; got none"),
    "a rate for an optimiser": (lambda: fit(optimiser=1e-2), TypeError, "must be an optax optimiser"),
    "no data": (lambda: fit(()), ValueError, "without data"),
    "a loss without a key": (
        lambda: fit(loss=lambda model, batch: 0.0), TypeError, r"key\)`. `<lambda>` cannot"
    ),
    "out-of-bag rows of other data": (
        lambda: fit(rows=np.zeros((MEMBERS, 8), int)).out_of_bag(X[:6]), ValueError, "all 8 rows .* got 6",
    ),
    "samples of an ensemble": (
        lambda: ee.methods.trajectory.sample(ensemble(), 2, key=KEY), TypeError, "a run or a training state",
    ),
    "out-of-bag rows of several outputs": (
        lambda: fit(rows=np.zeros((MEMBERS, 8), int)).out_of_bag(X, fn=lambda m, x: (m(x), x)), TypeError, "one output",
    ),
    "limits of other members": (
        lambda: fit(stop=ee.train.Stopping(steps=[1, 2])), ValueError, r"one per member \(4,\)",
    ),
    "a model instead of an ensemble": (
        lambda: ee.fit(ensemble().stacked, loss, optax.sgd(1e-2), (X, Y), epochs=1, key=KEY), TypeError, "from_stacked",
    ),
    "neither epochs nor steps": (lambda: fit(epochs=None), TypeError, "either `epochs` or `steps`"),
    "patience without validation": (lambda: fit(patience=3), TypeError, "validation="),
    "inside jit": (lambda: jax.jit(lambda x: fit((x, Y)).history.loss)(X), TypeError, "cannot run inside"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name, unhooked):
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 4


def test_one_rate_per_member_that_would_fit_the_last_axis(unhooked):
    """optax would scale the columns of a matrix, without an error."""
    members = ee.build(lambda key: eqx.nn.Linear(MEMBERS, MEMBERS, key=key), MEMBERS, key=KEY)
    data = np.ones((8, MEMBERS), np.float32), Y
    with pytest.raises(ValueError, match="holds an array of 4 numbers") as caught:
        ee.fit(members, loss, optax.sgd(jnp.full(MEMBERS, 0.1)), data, epochs=1, key=KEY)
    assert len(str(caught.value).splitlines()) <= 4


def test_a_forgotten_state(unhooked):
    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    members, _ = ee.build(eqx.nn.make_with_state(Net), MEMBERS, key=KEY)
    with pytest.raises(TypeError, match="no `state` was given"):
        ee.fit(members, loss, optax.sgd(1e-2), (X, Y), epochs=1, key=KEY)


def test_a_validation_score_that_is_no_number_is_told():
    with pytest.warns(UserWarning, match="are NaN: they keep their last weights"):
        run = fit(validation=ee.train.Validation((X, Y), score=lambda *_: jnp.nan * 1.0, mode="max"), patience=1)
    assert (run.best_step == -1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_traceback_of_an_error_in_a_loss_is_short(capsys):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.user_ns |= {
        "ee": ee,
        "options": {"epochs": 1, "key": KEY},
        "args": (optax.sgd(1e-2), (X, Y)),
        "e": ensemble(),
    }
    shell.run_cell(
        "def loss(model, batch, key):\n    raise ValueError('of the loss')\n\nee.fit(e, loss, *args, **options)"
    )
    lines = capsys.readouterr().out.strip().splitlines()
    assert "of the loss" in lines[-1]
    assert len(lines) < 40


@pytest.mark.slow
def test_hyper_parameters_that_nothing_uses_are_told():
    hyper = {"lr": jnp.ones(MEMBERS)}
    with pytest.warns(UserWarning, match="nothing uses `hyper`"):
        fit(hyper=hyper)
    with_hyper = lambda model, batch, key, hyper: hyper["lr"] * loss(model, batch, key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(optimiser=lambda hyper: optax.sgd(hyper["lr"]), hyper=hyper)
        ee.fit(ensemble(), with_hyper, optax.sgd(1e-2), (X, Y), hyper=hyper, epochs=1, key=KEY)
        fit(hyper=hyper, callbacks=lambda state: None)
