"""Array functions give the same in blocks of rows, and with members sorted by NumPy, as in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty
from eqx_ensemble._boundary import _rows

from .marking import slow_but

RNG = np.random.default_rng(0)
MEMBERS, ROWS, CLASSES = 5, 97, 3
LOGITS = RNG.normal(size=(MEMBERS, ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
VARIANCE = np.exp(RNG.normal(size=LOGITS.shape)).astype(np.float32)
TARGETS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5, 3.0])
MASK = RNG.random((ROWS, CLASSES)) < 0.7

SCORED = {"row_weights": [None, MASK], "reduction": ["mean", "none"]}
CASES = {
    "moments": (combine.moments, (LOGITS,), {}),
    "gaussian": (combine.gaussian, (LOGITS, VARIANCE), {}),
    "mean_logits": (combine.mean_logits, (LOGITS,), {}),
    "median": (combine.median, (LOGITS,), {}),
    "trimmed_mean": (combine.trimmed_mean, (LOGITS,), {"cut": [0.1, 0.3]}),
    "decompose_entropy": (uncertainty.decompose_entropy, (LOGITS,), {}),
    "decompose_variance": (uncertainty.decompose_variance, (LOGITS, VARIANCE), {}),
    "decompose_squared_error": (uncertainty.decompose_squared_error, (LOGITS, TARGETS), {}),
    "decompose_nll": (uncertainty.decompose_nll, (LOGITS, LABELS), {}),
    "quantile": (uncertainty.quantile, (LOGITS,), {"levels": [0.4, np.array([0.1, 0.9])]}),
    "interval": (uncertainty.interval, (LOGITS,), {"level": [0.5, 0.9]}),
    "crps": (scores.crps, (LOGITS, TARGETS), SCORED),
    "nll_gaussian_mixture": (scores.nll_gaussian_mixture, (LOGITS, VARIANCE, TARGETS), SCORED),
    "rmse": (scores.rmse, (LOGITS, TARGETS), {"row_weights": [None, MASK]}),
    "mean_member_rmse": (scores.mean_member_rmse, (LOGITS, TARGETS), {"row_weights": [None, MASK]}),
    "pit": (scores.pit, (LOGITS, TARGETS), {"row_weights": [None, MASK], "key": [None, jax.random.key(0)]}),
}


@pytest.fixture
def cut(monkeypatch):
    """Blocks of eleven rows."""
    monkeypatch.setattr(_rows, "_BYTES", 11 * MEMBERS * CLASSES * 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


def random_options(options, rng):
    chosen = {name: values[rng.integers(len(values))] for name, values in options.items()}
    return chosen | {"weights": [None, WEIGHTS][rng.integers(2)]}


@pytest.mark.parametrize("name", slow_but(["moments", "quantile"], CASES))
def test_blocks_change_nothing(name, cut):
    fn, arrays, options = CASES[name]
    dtype = [np.float32, np.float64][[*CASES].index(name) % 2]
    rng = np.random.default_rng(len(name))
    pairs = [random_options(options, rng) for _ in range(2)]
    with jax.enable_x64(dtype == np.float64):
        arrays = [jnp.asarray(x if x.dtype.kind == "i" else x.astype(dtype)) for x in arrays]
        for pair in pairs:
            got = fn(*arrays, **pair)
            whole = jax.jit(lambda *arrays, pair=pair: fn(*arrays, **pair))(*arrays)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
                assert x.dtype == dtype
                np.testing.assert_allclose(x, y, rtol=30 * np.finfo(dtype).eps, atol=30 * np.finfo(dtype).eps)


@pytest.mark.slow
def test_results_are_on_the_device_of_the_values(cut):
    second = jax.devices()[-1]
    for values in (jnp.asarray(LOGITS), jax.device_put(LOGITS, second)):
        found = combine.median(values)
        assert (found.committed, found.device) == (values.committed, values.device)
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((1,), ("rows",), axis_types=(axis_type,), devices=[second])
        values = jax.device_put(
            LOGITS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "rows", None))
        )
        for fn in (combine.median, combine.moments, combine.mean_logits):
            assert jax.tree.leaves(fn(values))[0].devices() == {second}


@pytest.mark.slow
def test_sharded_rows_stay_where_they_are(cut):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec(None, "rows")
    values = jax.device_put(LOGITS[:, :96], jax.sharding.NamedSharding(mesh, rows))
    for fn in (combine.median, combine.moments, lambda x: uncertainty.quantile(x, jnp.array([0.1, 0.9]))):
        for x, y in zip(jax.tree.leaves(fn(values)), jax.tree.leaves(fn(jnp.asarray(LOGITS[:, :96]))), strict=True):
            assert len(x.devices()) == 4
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    program = jax.jit(combine.median).lower(values).compile().as_text()
    assert not any(word in program for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("name", ["quantile", "crps"])
def test_constants_of_a_program_are_part_of_it(name, cut):
    fn, arrays, options = CASES[name]
    of = lambda: jax.tree.leaves(fn(*map(jnp.asarray, arrays), **{key: first for key, (first, *_) in options.items()}))[
        0
    ]
    np.testing.assert_allclose(jax.jit(of)(), of(), rtol=1e-5, atol=4e-6)
    np.testing.assert_allclose(jax.grad(lambda scale: jnp.sum(scale * of()))(1.0), jnp.sum(of()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradients_see_neither_blocks_nor_numpy(weights, cut):
    with jax.enable_x64(True):
        values, targets, weights = (x if x is None else jnp.asarray(x, float) for x in (LOGITS, TARGETS, weights))
        loss = lambda x: scores.crps(x, targets, weights=weights)
        aimed = 1e-6 * RNG.normal(size=values.shape)
        slope = float(jnp.sum(jax.grad(loss)(values) * aimed))
        assert slope == pytest.approx(float(loss(values + aimed) - loss(values - aimed)) / 2, rel=1e-3)
        if weights is not None:
            of_weights = jax.grad(lambda weights: combine.trimmed_mean(values, weights=weights).sum())(weights)
            assert of_weights.shape == weights.shape
            assert np.isfinite(of_weights).all()
