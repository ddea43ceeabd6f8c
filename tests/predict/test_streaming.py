import functools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._predict import _batch as _output

KEY, MEMBERS, ROWS = jax.random.key(0), 5, 11
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0, 1.5])
BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), MEMBERS, key=KEY)


def rows(count=ROWS):
    return jax.random.normal(jax.random.key(1), (count, 3))


def assert_close(found, want):
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


COMBINE = {
    "mixture": ee.combine.mixture,
    "decompose_entropy": ee.uncertainty.decompose_entropy,
    "streaming": ee.combine.streaming(ee.uncertainty.decompose_entropy),
    "numpy": lambda p, weights=None: np.average(p, axis=0, weights=weights),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("case", COMBINE)
def test_combined_by_batches_is_combined_on_the_whole(ensemble, case, weights):
    combine = COMBINE[case]
    named = {} if weights is None else {"weights": weights}
    want = combine(ee.predict(ensemble, rows()), **named)
    for batch_size in (4, 256):  # an uneven last batch, and one batch
        assert_close(ee.predict(ensemble, rows(), combine=combine, batch_size=batch_size, **named), want)
    other = ee.predict(ensemble[::-1], rows()[::-1], combine=combine, batch_size=4, **named)
    assert not np.allclose(jax.tree.leaves(other)[0], jax.tree.leaves(want)[0], rtol=1e-3)


class Sum(ee.combine.AbstractCombination):
    """A user's own weighted mean."""

    def update(self, partial, predictions, *, weights=None):
        own = jnp.asarray(weights)
        return self.merge(partial, (jnp.tensordot(own, predictions, 1), jnp.sum(own)))

    def merge(self, first, second):
        return second if first is None else jax.tree.map(jnp.add, first, second)

    def finish(self, partial):
        return partial[0] / partial[1]


@pytest.mark.parametrize("scale", [1e-50, 1e38, 1e50])
def test_weights_outside_float32(ensemble, scale):
    predictions = np.asarray(ee.predict(ensemble, rows()), np.float64)
    of_rows = WEIGHTS[:, None] * np.linspace(1, 2, ROWS)
    for combine, weights in ((ee.combine.mean, WEIGHTS), (Sum(), WEIGHTS), (ee.combine.mean, of_rows)):
        want = np.einsum("mr,mrc->rc", np.broadcast_to(weights.reshape(MEMBERS, -1), (MEMBERS, ROWS)), predictions)
        want /= weights.reshape(MEMBERS, -1).sum(axis=0)[:, None]
        found = ee.predict(ensemble, rows(), combine=combine, weights=weights * scale)
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_a_function_without_weights_is_called_without(ensemble):
    found = ee.predict(ensemble, rows(), combine=lambda p: jnp.median(p, axis=0), batch_size=4)
    np.testing.assert_allclose(found, np.median(ee.predict(ensemble, rows()), axis=0), rtol=1e-6)


def test_combined_in_a_compiled_program(ensemble):
    combined = lambda ensemble, x, weights: ee.predict(
        ensemble, x, combine=ee.combine.streaming(ee.combine.mean), weights=weights
    )
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    assert_close(eqx.filter_jit(combined)(ensemble, rows(), weights), combined(ensemble, rows(), weights))


def test_differentiable(ensemble):
    def total(x, batch_size):
        return jnp.sum(ee.predict(ensemble, x, combine=ee.combine.mean, batch_size=batch_size) ** 2)

    assert_close(jax.grad(total)(rows(), 4), jax.grad(total)(rows(), 256))


def test_of_a_run(ensemble):
    def loss(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    data = rows(), jnp.zeros((ROWS, 4))
    run = ee.fit(ensemble, loss, optax.sgd(0.1), data, epochs=1, batch_size=ROWS, progress=False, key=KEY)
    want = ee.combine.mean(ee.predict(run.ensemble, rows()), weights=WEIGHTS)
    assert_close(run.predict(rows(), combine=ee.combine.mean, weights=WEIGHTS, batch_size=4), want)


class LargestGap(ee.combine.AbstractCombination):
    """A user's own: the largest distance between two members' predictions, entry by entry."""

    def update(self, partial, predictions, *, weights=None):
        return self.merge(partial, (jnp.min(predictions, axis=0), jnp.max(predictions, axis=0)))

    def merge(self, first, second):
        if first is None:
            return second
        return jnp.minimum(first[0], second[0]), jnp.maximum(first[1], second[1])

    def finish(self, partial):
        return partial[1] - partial[0]


def mean_and_variance(model, x):
    out = model(x)
    return out, jnp.exp(out)


OPTIONS = {
    "plain": {},
    "own": {"combine": LargestGap()},
    "a partial": {"combine": functools.partial(ee.uncertainty.quantile, levels=0.3), "weights": WEIGHTS},
    "a pair": {"combine": ee.combine.gaussian, "fn": mean_and_variance, "weights": WEIGHTS},
    "the parts of a pair": {"combine": ee.uncertainty.decompose_variance, "fn": mean_and_variance},
    "chunks": {"combine": ee.uncertainty.decompose_entropy, "plan": ee.plan.Chunked(2)},
    "unrolled": {"combine": ee.combine.moments, "plan": ee.plan.Unrolled()},
    "function": {"combine": ee.combine.mixture, "weights": WEIGHTS},
    "a list of weights": {"combine": ee.combine.mixture, "weights": WEIGHTS.tolist()},
    "quantiles": {"combine": ee.combine.QuantileSketch([0.2, 0.5]), "weights": WEIGHTS},
    "sequential": {"plan": ee.plan.Sequential()},
}


STREAMING = [
    ee.combine.mean, ee.combine.moments, ee.combine.mixture, ee.combine.mean_logits, ee.combine.vote,
    ee.uncertainty.decompose_entropy, ee.uncertainty.disagreement, ee.uncertainty.variation_ratio,
]  # fmt: skip


@pytest.mark.parametrize("combine", STREAMING, ids=lambda fn: fn.__name__)
def test_all_members_at_hand_are_combined_by_the_function_itself(ensemble, combine):
    found = ee.predict(ensemble, rows(), combine=combine, weights=WEIGHTS)
    want = combine(ee.predict(ensemble, rows()), weights=WEIGHTS)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", OPTIONS)
def test_batches_change_nothing(ensemble, case):
    want = ee.predict(ensemble, rows(21), **OPTIONS[case] | {"plan": None})
    assert_close(ee.predict(ensemble, rows(21), batch_size=8, **OPTIONS[case]), want)


def test_the_result_does_not_fit(ensemble, monkeypatch):
    monkeypatch.setattr(_output, "free_bytes", lambda: MEMBERS * ROWS * 4 * 4 - 1)
    with pytest.raises(MemoryError, match=r"no memory for its result \(5, 11, 4\): 880 bytes.*\n.*decompose_entropy"):
        ee.predict(ensemble, rows(), batch_size=4)
    assert ee.predict(ensemble, rows(), combine=ee.combine.mean, batch_size=4).shape == (ROWS, 4)
    monkeypatch.setattr(_output, "free_bytes", lambda: ROWS * 4 * 4 - 1)
    with pytest.raises(MemoryError, match=r"\(11, 4\): 176 bytes.*\nCall it with some rows"):
        ee.predict(ensemble, rows(), combine=ee.combine.mean, batch_size=4)


def test_a_result_stays_where_its_parts_are(ensemble):
    mesh = jax.make_mesh((4,), ("members",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    spread = ee.concatenate([ensemble, ensemble[:3]], renumber=True)
    want = ee.predict(spread, rows())
    spread = jax.tree.map(lambda x: jax.device_put(x, sharding) if eqx.is_array(x) else x, spread)
    found = ee.predict(spread, rows(), batch_size=4)
    assert {shard.data.shape[0] for shard in found.addressable_shards} == {2}
    assert_close(found, want)
    combined = ee.predict(spread, rows(), combine=ee.combine.mean, batch_size=4)
    assert_close(combined, np.mean(want, axis=0))


BAD = {
    "rows": ({"combine": lambda p: jnp.mean(p)}, ValueError, r"returns arrays `\(rows, ...\)`; it gave \(\)"),
    "another axis in front": (
        {"combine": lambda p: jnp.quantile(p, jnp.array([0.1, 0.9]), axis=0)},
        ValueError,
        r"it gave \(2, 16, 4\) for 16 rows.\nTo move an axis",
    ),
    "weights of nothing": ({"weights": WEIGHTS}, TypeError, "takes `weights` for `combine`"),
    "too few weights": ({"combine": ee.combine.mean, "weights": [1.0]}, ValueError, r"expected shape \(5,\)"),
    "zeros": ({"combine": ee.combine.mean, "weights": [0.0] * 5}, ValueError, "not all zero"),
    "a class": (
        {"combine": ee.combine.QuantileSketch},
        TypeError,
        r"Pass `QuantileSketch\(...\)` instead of the class",
    ),
    "no function": ({"combine": "mean"}, TypeError, "a function or a combination, got 'mean'"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("unhooked")
def test_mistakes(ensemble, case):
    options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ee.predict(ensemble, rows(), **options)
