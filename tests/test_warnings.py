"""Warnings that the library ignores are those of one thread, and the filters of the others stay."""

import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._warnings import ignore_warnings

KEY = jax.random.key(0)


def texts(call):
    """What `call` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_what_is_ignored():
    def call():
        with ignore_warnings("of this"):
            warnings.warn("Of this kind", stacklevel=1)
            warnings.warn("none of this kind", DeprecationWarning, stacklevel=1)
        warnings.warn("of this kind", stacklevel=1)

    assert texts(call) == ["none of this kind", "of this kind"]


def test_an_error_is_not_ignored_and_filters_are_as_before():
    before = list(warnings.filters)
    with pytest.raises(ValueError, match="own"), ignore_warnings():
        raise ValueError("own")
    assert list(warnings.filters) == before


def test_other_threads_keep_their_warnings():
    started, warned = threading.Event(), threading.Event()

    def other():
        started.wait(10)
        warnings.warn("of the other thread", stacklevel=1)
        warned.set()

    def call():
        thread = threading.Thread(target=other)
        thread.start()
        with ignore_warnings():
            warnings.warn("of this thread", stacklevel=1)
            started.set()
            warned.wait(10)
        thread.join()

    assert texts(call) == ["of the other thread"]


def test_threads_that_overlap_leave_no_filter():
    """The first ends first: `warnings.catch_warnings` would then leave what it had changed."""
    before, entered, left = list(warnings.filters), threading.Event(), threading.Event()

    def second():
        with ignore_warnings():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with ignore_warnings():
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    assert list(warnings.filters) == before
    assert texts(lambda: warnings.warn("seen", stacklevel=1)) == ["seen"]


def test_filters_that_another_thread_restores_ignore_nothing():
    """Filters that were copied while this one was among them are put back later."""
    own = ignore_warnings()
    own.__enter__()
    copied = list(warnings.filters)
    own.__exit__(None, None, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filters.insert(0, copied[0])
        warnings.warn("seen", stacklevel=1)
    assert len(caught) == 1


class TestTheLineThatAWarningNames:
    """That of the user's code, however many calls of the library and of Equinox are between."""

    @staticmethod
    def loss(model, batch, key):
        return jnp.nan * jnp.sum(jax.vmap(model)(batch))

    def lines(self, call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert caught
        return {(warning.filename, warning.lineno) for warning in caught}

    @pytest.mark.slow
    def test_of_fit(self):
        ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
        call = lambda: ee.fit(ensemble, self.loss, optax.sgd(0.1), jnp.ones((4, 2)), steps=1, key=KEY)
        assert self.lines(call) == {(__file__, call.__code__.co_firstlineno)}

    @pytest.mark.slow
    def test_of_a_method_of_a_module(self):
        ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 2, key=KEY)
        hyper = {"scale": jnp.array([1.0, jnp.nan])}
        loss = lambda model, batch, key, hyper: hyper["scale"] * jnp.sum(jax.vmap(model)(batch))
        with pytest.warns(UserWarning, match="diverged"):
            run = ee.fit(ensemble, loss, optax.sgd(0.1), jnp.ones((4, 2)), steps=1, hyper=hyper, key=KEY)
        call = lambda: run.predict(jnp.ones((4, 2)))
        assert self.lines(call) == {(__file__, call.__code__.co_firstlineno)}

    def test_of_a_score(self):
        call = lambda: ee.scores.nll(jnp.array([[[0.2, 0.8]]]), jnp.array([0]))
        assert self.lines(call) == {(__file__, call.__code__.co_firstlineno)}
