"""Iterables of batches: one pass is an epoch."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close, assert_same

KEY, MEMBERS = jax.random.key(5), 3
X = np.asarray(jax.random.normal(jax.random.key(1), (20, 3)))
Y = np.sin(X[:, 0])
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8)]
HELD_OUT = (X[16:], Y[16:])
ADAM = optax.adam(1e-2)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


@ft.cache
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def fit(data, **options):
    return ee.fit(ensemble(), loss, ADAM, data, key=KEY, validation=HELD_OUT, **options)


@ft.cache
def expected():
    """The same batches as rows in their order."""
    return fit((X[:16], Y[:16]), epochs=3, batch_size=8, shuffle=False)


class Loader:
    """Batches whose memory is filled again, as some loaders do."""

    def __iter__(self):
        own = [np.empty_like(x) for x in BATCHES[0]]
        for batch in BATCHES:
            for memory, x in zip(own, batch, strict=True):
                memory[:] = x
            yield tuple(own)
            for memory in own:
                memory.fill(0)


@pytest.mark.parametrize("data", [BATCHES, Loader()], ids=["list", "loader"])
def test_passes(data):
    run = fit(data, epochs=3)
    assert_close(run.ensemble, expected().ensemble, 1e-6)
    np.testing.assert_allclose(run.history.loss, expected().history.loss, rtol=1e-5)
    np.testing.assert_allclose(run.history.validation, expected().history.validation, rtol=1e-5)
    np.testing.assert_array_equal(run.history.validation_step, [2, 4, 6])


def test_steps_of_a_generator():
    run = fit((batch for _ in range(9) for batch in BATCHES), steps=5)
    np.testing.assert_allclose(run.history.loss, expected().history.loss[:, :5], rtol=1e-5)
    assert run.train_state.step.tolist() == [5] * MEMBERS


def test_in_blocks():
    run = fit(BATCHES, epochs=3, plan=ee.plan.Blocks(2))
    assert_close(run.ensemble, expected().ensemble, 1e-6)


def test_batches_of_their_own_and_smaller_ones():
    own = [(ee.Each(np.stack([x] * MEMBERS)), y) for x, y in [*BATCHES, HELD_OUT]]
    run, shared = fit(own, epochs=2, plan=ee.plan.Blocks(2)), fit([*BATCHES, HELD_OUT], epochs=2)
    assert_close(run.ensemble, shared.ensemble, 1e-6)
    assert run.history.loss.shape == (MEMBERS, 6)


def test_auxiliary_outputs():
    with_aux = lambda model, batch, key: (loss(model, batch, key), batch[1])
    run = ee.fit(ensemble(), with_aux, ADAM, BATCHES, epochs=2, has_aux=True, key=KEY)
    np.testing.assert_array_equal(run.history.aux[1], np.stack([y for _, y in [*BATCHES, *BATCHES]]))


@pytest.mark.slow
def test_on_a_mesh():
    """Two devices for three members: what is of one's own is padded as the members are."""
    own = [(x, ee.Each(np.stack([y + i for i in range(MEMBERS)]))) for x, y in BATCHES]
    numbered = lambda model, batch, key: (loss(model, batch, key), len(batch[1]))
    fit = lambda mesh: ee.fit(ensemble(), numbered, ADAM, own, epochs=2, has_aux=True, mesh=mesh, key=KEY)
    run = fit(ee.make_mesh(2, 2))
    assert_close(run.ensemble, fit(None).ensemble, 1e-5)
    assert (run.history.aux == 8).all()


def test_a_diverged_member_gets_back_the_pass_before():
    broken = [*BATCHES, (ee.Each(np.stack([X[:8], X[:8] * np.nan, X[:8]])), Y[:8])]
    options = {"epochs": 2, "key": KEY, "plan": ee.plan.Blocks(2)}
    with pytest.warns(UserWarning, match="members 1 diverged"):
        run = ee.fit(ensemble(), loss, ADAM, broken, **options)
    assert_same(run.ensemble[1], ensemble()[1])
    assert run.train_state.step.tolist() == [6, 0, 6]


def test_an_error_of_the_data_has_the_run_so_far():
    def failing():
        yield from BATCHES
        raise OSError("disk")

    class Data:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(BATCHES) if self.passes < 4 else failing()

    with pytest.raises(OSError, match="disk") as caught:
        fit(Data(), epochs=9)
    assert caught.value.run.train_state.step[0] >= 2


def test_options_of_arrays_and_empty_passes_are_refused():
    with pytest.raises(TypeError, match="only for data in arrays"):
        fit(BATCHES, epochs=1, batch_size=8)
    with pytest.raises(ValueError, match="got none"):
        fit(iter(()), epochs=1)
    with pytest.raises(ValueError, match="only once"):
        fit(iter(BATCHES), epochs=2)
