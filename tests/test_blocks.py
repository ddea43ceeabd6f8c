"""Array functions give the same in blocks of rows, and with members sorted by NumPy, as in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty
from eqx_ensemble._combination import _blocks, _order
from eqx_ensemble.scores import _regression

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
    """Blocks of eleven rows, of seven entries where members are sorted, and groups of two members."""
    monkeypatch.setattr(_blocks, "_BYTES", 11 * MEMBERS * CLASSES * 4)
    monkeypatch.setattr(_order, "_BYTES", 7 * MEMBERS * 4)
    monkeypatch.setattr(_order, "_FEWEST_NUMBERS", 0)
    monkeypatch.setattr(_regression, "_GROUP", 2)
    monkeypatch.setattr(_regression, "_LANES", 16)
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


@pytest.mark.parametrize("shape", [(1, 97), (3, 97), (8, 97), (19, 97), (97, 2)], ids=str)
@pytest.mark.parametrize("fn", [scores.rmse, scores.mean_member_rmse])
def test_few_members_and_few_rows(fn, shape, monkeypatch):
    """Fewer members than are added in registers, and fewer rows than sums side by side."""
    monkeypatch.setattr(_blocks, "_BYTES", 0)
    predictions, targets = jnp.asarray(RNG.normal(size=shape)), jnp.asarray(RNG.normal(size=shape[1:]))
    np.testing.assert_allclose(fn(predictions, targets), jax.jit(fn)(predictions, targets), rtol=1e-5)


def test_rows_are_in_blocks(cut):
    shapes = []

    def fn(members, rows, shared):
        shapes.append(members.shape)
        return jnp.sum(members, axis=0) + rows + shared

    members, rows = jnp.asarray(LOGITS), jnp.asarray(TARGETS)
    np.testing.assert_allclose(_blocks.by_rows(fn, members, rows, 1.0), LOGITS.sum(0) + TARGETS + 1, rtol=1e-5)
    assert (MEMBERS, 33) in shapes, "eleven rows of three classes"
    del shapes[:]
    jax.jit(lambda members: _blocks.by_rows(fn, members, rows, 1.0))(members)
    assert set(shapes) == {LOGITS.shape}, "the user's own program has no blocks"


def in_order(values, weights=None, **named):
    return _order.by_order(
        lambda ordered, own, _: (jnp.moveaxis(ordered, 0, -1), own if own is None else jnp.moveaxis(own, 0, -1)),
        values,
        weights,
        **named,
    )


@pytest.mark.parametrize("members", [1, 2, 3, 13, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_members_are_sorted_as_jax_does(members, dtype, cut):
    values = RNG.normal(size=(members, 10, 5)).astype(dtype)
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        values[RNG.random(values.shape) < 0.05] = special
    ties = np.where(RNG.random(values.shape) < 0.3, np.sign(values) * RNG.integers(2, size=values.shape), values)
    centre, weights = RNG.normal(size=(10, 5)).astype(dtype), np.arange(members).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        values, centre, weights = (jnp.asarray(x) for x in (values, centre, weights))
        for x in (values, jnp.asarray(ties.astype(dtype))):
            np.testing.assert_array_equal(in_order(x)[0], np.moveaxis(np.sort(x, axis=0), 0, -1))
        for fill in (0.0, np.inf):
            got = in_order(values, weights, centre=centre, fill=fill)
            traced = jax.jit(lambda *x, fill=fill: in_order(x[0], x[1], centre=x[2], fill=fill))(
                values, weights, centre
            )
            np.testing.assert_array_equal(got[0], traced[0])
            known = np.isfinite(got[0]) & (np.asarray(got[0]) != fill)  # values that are their own
            np.testing.assert_array_equal(np.asarray(got[1])[known], np.asarray(traced[1])[known])


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


@pytest.mark.parametrize("name", ["moments", "quantile", "crps", "rmse"])
def test_constants_of_a_program_are_part_of_it(name, cut):
    fn, arrays, options = CASES[name]
    of = lambda: jax.tree.leaves(fn(*map(jnp.asarray, arrays), **{key: first for key, (first, *_) in options.items()}))[
        0
    ]
    np.testing.assert_allclose(jax.jit(of)(), of(), rtol=1e-5, atol=4e-6)
    np.testing.assert_allclose(jax.grad(lambda scale: jnp.sum(scale * of()))(1.0), jnp.sum(of()), rtol=1e-4)


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_sorted_as_by_numpy(cut, dtype):
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 2e-38, -2e-38]
    key = np.random.default_rng(0).permutation(np.concatenate([RNG.normal(size=57), special, special])).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        row = jnp.arange(key.size)
        for sort in (_order.sort_rows, jax.jit(_order.sort_rows)):
            ranked, order = sort(jnp.asarray(key), row)
            np.testing.assert_array_equal(ranked, np.sort(key))
            np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
