"""Data with NaN: trained on if the loss masks them, named as the likely cause of a divergence if it does not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = np.stack([np.sin(X[:, 0]), np.cos(X[:, 1])], axis=1)
KNOWN = np.ones(Y.shape, bool)
KNOWN[::3, 0] = KNOWN[1::3, 1] = False
MISSING = np.where(KNOWN, Y, np.nan).astype(np.float32)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), 3, key=KEY)
OPTIONS = {"epochs": 2, "key": KEY}


def masked(model, batch, key):
    x, y, known = batch
    error = jnp.where(known, jax.vmap(model)(x) - jnp.where(known, y, 0), 0)
    return jnp.sum(error**2) / jnp.maximum(known.sum(dtype=y.dtype), 1)


def of_finite(model, batch, key):
    return masked(model, (*batch, jnp.isfinite(batch[1])), key)


def unmasked(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


SOURCES = {
    "arrays": lambda *arrays: (arrays, {"shuffle": False, "batch_size": 8}),
    "reader": lambda *arrays: (ee.train.RowReader(arrays), {"shuffle": False, "batch_size": 8}),
    "iterable": lambda *arrays: ([tuple(x[i : i + 8] for x in arrays) for i in (0, 8, 16)], {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_masked_values_are_trained_on(kind):
    """As zeros with a mask."""
    (data, options), (filled, _) = SOURCES[kind](X, MISSING), SOURCES[kind](X, np.nan_to_num(MISSING), KNOWN)
    run = ee.fit(ENSEMBLE, of_finite, optax.sgd(0.1), data, validation=(X, MISSING), **options, **OPTIONS)
    want = ee.fit(ENSEMBLE, masked, optax.sgd(0.1), filled, **options, **OPTIONS)
    assert (run.status == ee.train.Status.OK).all()
    np.testing.assert_allclose(run.history.loss, want.history.loss, rtol=1e-6)
    assert np.isfinite(run.history.validation).all()


@pytest.mark.parametrize("kind", SOURCES)
def test_a_divergence_names_the_values(kind):
    wrong = Y.astype(np.float32).copy()
    wrong[17, 1] = np.nan
    data, options = SOURCES[kind](X, wrong)
    where = {"arrays": r"`data\[1\]` .* \(17, 1\)", "reader": r"16, 17, .*`batch\[1\]` .* \(1, 1\)",
             "iterable": r"batch 3 .*`batch\[1\]` .* \(1, 1\)"}[kind]  # fmt: skip
    with pytest.warns(UserWarning, match=rf"diverged(.|\n)*a likely cause: .*{where}(.|\n)*mask the values"):
        run = ee.fit(ENSEMBLE, unmasked, optax.sgd(0.1), data, **options, **OPTIONS)
    assert (run.stopped_at == 2).all()
    with pytest.raises(ee.train.DivergedError, match="a likely cause"):
        ee.fit(ENSEMBLE, unmasked, optax.sgd(0.1), data, on_diverge="raise", **options, **OPTIONS)
