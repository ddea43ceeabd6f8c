"""Array functions give the same in blocks of rows and with a sorting network as in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import _sorting, combine, scores, uncertainty
from eqx_ensemble._combination import _blocks

RNG = np.random.default_rng(0)
MEMBERS, ROWS, CLASSES = 5, 97, 3
LOGITS = RNG.normal(size=(MEMBERS, ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
VARIANCE = np.exp(RNG.normal(size=LOGITS.shape)).astype(np.float32)
TARGETS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5, 3.0])
MASK = RNG.random((ROWS, CLASSES)) < 0.7

SCORED = {"mask": [None, MASK], "reduction": ["mean", "none"]}
CASES = {
    "moments": (combine.moments, (LOGITS,), {}),
    "gaussian": (combine.gaussian, (LOGITS, VARIANCE), {}),
    "mean_logits": (combine.mean_logits, (LOGITS,), {}),
    "median": (combine.median, (LOGITS,), {}),
    "trimmed_mean": (combine.trimmed_mean, (LOGITS,), {"cut": [0.1, 0.3]}),
    "decompose_variance": (uncertainty.decompose_variance, (LOGITS, VARIANCE), {}),
    "decompose_squared_error": (uncertainty.decompose_squared_error, (LOGITS, TARGETS), {}),
    "decompose_nll": (uncertainty.decompose_nll, (LOGITS, LABELS), {}),
    "quantile": (uncertainty.quantile, (LOGITS,), {"levels": [0.4, np.array([0.1, 0.9])]}),
    "interval": (uncertainty.interval, (LOGITS,), {"level": [0.5, 0.9]}),
    "crps": (scores.crps, (LOGITS, TARGETS), SCORED),
    "nll_gaussian_mixture": (scores.nll_gaussian_mixture, (LOGITS, VARIANCE, TARGETS), SCORED),
    "rmse": (scores.rmse, (LOGITS, TARGETS), {"mask": [None, MASK]}),
    "pit": (scores.pit, (LOGITS, TARGETS), {"mask": [None, MASK], "key": [None, jax.random.key(0)]}),
}


@pytest.fixture
def cut(monkeypatch):
    """Blocks of eleven rows, and a network for every array."""
    monkeypatch.setattr(_blocks, "_BYTES", 11 * MEMBERS * CLASSES * 4)
    monkeypatch.setattr(_sorting, "_BYTES", 7 * MEMBERS * 4)
    monkeypatch.setattr(_sorting, "_FEWEST_NUMBERS", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def random_options(options, rng):
    chosen = {name: values[rng.integers(len(values))] for name, values in options.items()}
    return chosen | {"weights": [None, WEIGHTS][rng.integers(2)]}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_blocks_change_nothing(name, dtype, cut):
    fn, arrays, options = CASES[name]
    rng = np.random.default_rng(len(name))
    pairs = [random_options(options, rng) for _ in range(3)]
    with jax.enable_x64(dtype == np.float64):
        arrays = [jnp.asarray(x if x.dtype.kind == "i" else x.astype(dtype)) for x in arrays]
        for pair in pairs:
            got = fn(*arrays, **pair)
            whole = jax.jit(lambda *arrays, pair=pair: fn(*arrays, **pair))(*arrays)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
                assert x.dtype == dtype
                np.testing.assert_allclose(x, y, rtol=30 * np.finfo(dtype).eps, atol=30 * np.finfo(dtype).eps)


def test_rows_are_in_blocks(cut):
    shapes = []

    def fn(members, rows, shared):
        shapes.append(members.shape)
        return jnp.sum(members, axis=0) + rows + shared

    members, rows = jnp.asarray(LOGITS), jnp.asarray(TARGETS)
    np.testing.assert_allclose(_blocks.by_rows(fn, members, rows, 1.0), LOGITS.sum(0) + TARGETS + 1, rtol=1e-5)
    assert (MEMBERS, 33) in shapes
    del shapes[:]
    jax.jit(lambda members: _blocks.by_rows(fn, members, rows, 1.0))(members)
    assert set(shapes) == {LOGITS.shape}, "the user's own program has no blocks"


@pytest.mark.parametrize("members", [1, 2, 3, 8, 13, 64])
def test_the_network_sorts_as_numpy_does(members, cut):
    values = RNG.normal(size=(members, 50)).astype(np.float32)
    for special in (np.nan, -np.nan, np.inf, -np.inf, 0.5):
        values[RNG.random(values.shape) < 0.05] = special
    np.testing.assert_array_equal(jax.jit(_sorting.sort)(values), np.sort(values, axis=0))
    weights = np.where(np.isfinite(values), np.floor(values * 100), 0).astype(np.float32)
    ordered, carried = jax.jit(_sorting.sort_pairs)(values, weights)
    np.testing.assert_array_equal(ordered, np.sort(values, axis=0))
    finite = np.isfinite(np.asarray(ordered))
    np.testing.assert_array_equal(np.asarray(carried)[finite], np.floor(np.asarray(ordered)[finite] * 100))


def test_the_gradient_of_the_network_is_that_of_sorting(cut):
    values = jnp.asarray(np.round(RNG.normal(size=(6, 20)), 1).astype(np.float32))  # with ties
    scale = jnp.arange(6.0)[:, None]
    of = lambda sort: jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(sort(x[:, None])) * scale)), in_axes=1)(values)
    np.testing.assert_array_equal(of(_sorting.sort), of(lambda x: jnp.sort(x, axis=0)))
    of_pairs = lambda sort: jax.grad(lambda x: jnp.sum(jnp.prod(jnp.stack(sort(x, x**2)), axis=0) * scale))(values)
    plain = lambda x, y: jax.lax.sort((x, y), dimension=0, num_keys=1)
    np.testing.assert_allclose(of_pairs(_sorting.sort_pairs), of_pairs(plain), rtol=1e-6)
