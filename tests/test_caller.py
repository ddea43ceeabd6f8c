"""Messages name the public function that the user's code called."""

import builtins
import functools as ft
import traceback
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import _caller

KEY = jax.random.key(0)
LOGITS = jnp.ones((3, 4, 2))
LABELS = jnp.zeros(5, int)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 3, key=KEY)
X, Y = jnp.ones((8, 2)), jnp.ones((8, 1))


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def score_in_loss(model, batch, key):
    return mse(model, batch, key) + ee.scores.rmse(jnp.ones((2, 3)), jnp.ones(4))


fit = ft.partial(ee.fit, ENSEMBLE, optimiser=optax.sgd(0.1), data=(X, Y), batch_size=4, key=KEY)
CALLS = {
    "scores.nll": lambda: ee.scores.nll(LOGITS, LABELS),
    "scores.brier": lambda: eqx.filter_jit(ee.scores.brier)(LOGITS, LABELS),
    "scores.ece": lambda: jax.eval_shape(lambda x: jax.jit(ee.scores.ece)(x, LABELS), LOGITS),
    "scores.rmse": lambda: fit(loss=score_in_loss, epochs=1),
    "fit": lambda: fit(loss=mse),
    "methods.cross_fit": lambda: ee.methods.cross_fit(
        ENSEMBLE, mse, optax.sgd(0.1), (X, Y), ee.resample.folds(8, 3, key=KEY), x=X, batch_size=0, epochs=1, key=KEY
    ),
    "Ensemble.__getitem__": lambda: ENSEMBLE[7],
    "Each": lambda: ee.Each([eqx.nn.Linear(2, 1, key=KEY)]),
    "plan.Chunked": lambda: ee.plan.Chunked(0),
    "conformal.Split": lambda: ee.conformal.split(jnp.arange(9.0), jnp.zeros(9), level=0.5)(jnp.ones(3, int)),
    "conformal.Aci.update": lambda: ee.conformal.aci(level=0.9).update("x"),
    "train.make_step": lambda: ee.train.make_step(mse, optax.sgd(0.1))(
        ee.train.init(ENSEMBLE, optax.sgd(0.1), key=KEY), (X[:0], Y[:0])
    ),
    "map_members(first)": lambda: ee.map_members(first)(X),
    "combine.mixture": lambda: ee.predict(ENSEMBLE, X, combine=ee.combine.mixture, fn=pair),
    "combine.gaussian": lambda: ee.combine.streaming(ee.combine.gaussian).update(None, X),
}


def pair(model, x):
    return model(x), model(x)


def first(model):
    return model.weight[0]


def named(call):
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    return str(caught.value).partition("`")[2].partition("`")[0]


@pytest.mark.parametrize("name", CALLS)
def test_message_names_what_was_called(unhooked, name):
    assert named(CALLS[name]) == name


def test_message_in_another_thread(unhooked):
    with ThreadPoolExecutor(1) as executor:
        assert named(lambda: executor.submit(ee.scores.nll, LOGITS, LABELS).result()) == "scores.nll"


def test_calls_without_errors_look_for_no_name(monkeypatch):
    monkeypatch.setattr(_caller, "_public_name", None)
    ee.scores.nll(LOGITS, LABELS[:4])
    ENSEMBLE[1](X[0])


def fails(model, *args):
    width = 7
    raise RuntimeError(width)


USERS = {
    "fit": lambda: fit(loss=fails, epochs=1),
    "make_step": lambda: ee.train.make_step(fails, optax.sgd(0.1))(
        ee.train.init(ENSEMBLE, optax.sgd(0.1), key=KEY), (X, Y)
    ),
    "predict": lambda: ee.predict(ENSEMBLE, X, fn=fails),
    "map_members": lambda: ee.map_members(fails)(ENSEMBLE),
    "map_members, compiled": lambda: ee.map_members(fails, plan=ee.plan.Sequential())(ENSEMBLE),
}


def own_frames(call, error):
    """Whether each frame of the library is hidden, and the last frame."""
    with pytest.raises(error) as caught:
        call()
    frames = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    own = [frame for frame in frames if frame.f_globals["__name__"].startswith("eqx_ensemble.")]
    always = {"eqx_ensemble._suggest", "eqx_ensemble._transfers"}
    assert all("__tracebackhide__" in frame.f_locals for frame in own if frame.f_globals["__name__"] in always)
    rest = [frame for frame in own if frame.f_globals["__name__"] not in always]
    return {"__tracebackhide__" in frame.f_locals for frame in rest}, frames[-1]


@pytest.mark.parametrize("name", USERS)
def test_ipython_hides_the_frames_between_two_of_the_user(monkeypatch, name):
    assert own_frames(USERS[name], RuntimeError)[0] == {False}
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    hidden, last = own_frames(USERS[name], RuntimeError)
    assert hidden == {True}
    assert last.f_locals["width"] == 7
    assert "__tracebackhide__" not in last.f_locals


def test_ipython_shows_the_frames_of_an_error_of_the_library(monkeypatch, unhooked):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    assert own_frames(CALLS["scores.nll"], ValueError)[0] == {False}
