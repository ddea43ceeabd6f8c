"""Row orders: permutations, exactly; uniform, by chi-square; and as good for training as NumPy's."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import eqx_ensemble as ee
from eqx_ensemble.train import _order as _permute
from eqx_ensemble.train._order import factors, permute, stream

from ..marking import slow_but
from .plain_orders import plain_permutation

KEY = jax.random.key(0)
LEVEL = 1e-7  # of each test: fewer than a hundred are made
KEYS = 2**17


def words_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


def drawn(words, epoch, positions, length):
    """The permutations of all keys at some positions `(keys, positions)`."""
    positions = jnp.asarray(positions, jnp.int32)
    of_one = lambda words: permute(words, jnp.int32(epoch), positions, length)
    return np.asarray(jax.jit(jax.vmap(of_one))(words))


@pytest.mark.parametrize("length", slow_but([1, 101], [1, 2, 3, 64, 101, 1129]))
def test_every_epoch_is_a_permutation_and_the_plain_one(length):
    words = words_of(6, seed=length)
    for epoch in (0, 1, 2**31 - 1):
        found = drawn(words, epoch, np.arange(length), length)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.broadcast_to(np.arange(length), found.shape))
        for one, own in zip(words[:2], found, strict=False):
            np.testing.assert_array_equal(own, plain_permutation(one, epoch, length))


@pytest.mark.parametrize("length", [999_999, 2_000_003])
def test_long_permutations(length):
    found = drawn(words_of(1), 3, np.arange(length), length)[0]
    assert (np.bincount(found, minlength=length) == 1).all()


@pytest.mark.parametrize("length", [64, 70, 71, 131, 1129, 10_007, 2**20 - 3, 2**31 - 1])
def test_sides_hold_all_rows_and_few_others(length):
    rows, columns = factors(length)
    assert length <= rows * columns <= length * 1.1
    assert max(rows, columns) < 2**16
    assert max(rows, columns) <= 4.2 * min(rows, columns)


def test_some_numbers_walk():
    outside = {length: np.prod(factors(length)) - length for length in (1031, 1129, 2039)}
    assert set(outside.values()) - {0}, outside  # or the tests above see no walk
    assert max(np.prod(factors(length)) - length for length in range(64, 2049)) >= 2


@pytest.mark.slow
def test_any_part_is_computed_alone():
    words, length = words_of(3), 1031
    whole = drawn(words, 5, np.arange(length), length)
    positions = np.array([1030, 0, 77, 500])
    np.testing.assert_array_equal(drawn(words, 5, positions, length), whole[:, positions])
    np.testing.assert_array_equal(drawn(words[1:2], 5, positions, length), whole[1:2, positions])


@pytest.mark.slow
def test_memory_follows_the_positions_not_the_length():
    def temporary(length):
        of_one = lambda words: permute(words, jnp.int32(0), jnp.arange(32, dtype=jnp.int32), length)
        return jax.jit(jax.vmap(of_one)).lower(words_of(64)).compile().memory_analysis().temp_size_in_bytes

    assert temporary(10**6) <= 1.1 * temporary(10**4) + 64 * 1024


# Uniformity


def chi_square(found, expected):
    expected = np.broadcast_to(expected, found.shape).astype(float)
    assert found[expected == 0].sum() == 0
    found, expected = found[expected > 0], expected[expected > 0]
    return stats.chi2.sf(((found - expected) ** 2 / expected).sum(), len(found) - 1)


def p_values(words, epoch, length):
    """Of where single rows go, where pairs go, and how far apart they are."""
    side = factors(length)[1] if length >= 64 else 2
    positions = sorted({0, 1, side, side + 1, length // 2, length - 2, length - 1} & set(range(length)))
    found = drawn(words, epoch, positions, length).astype(np.int64)
    parts = min(length, 16)
    part = lambda x: x * parts // length
    sizes = np.bincount(part(np.arange(length)))
    for i in range(len(positions)):
        yield chi_square(np.bincount(found[:, i], minlength=length), len(words) / length)
        for j in range(i):
            pairs = np.bincount(part(found[:, i]) * parts + part(found[:, j]), minlength=parts**2)
            among = np.outer(sizes, sizes) - np.diag(sizes)
            yield chi_square(pairs, among.ravel() * (len(words) / (length * (length - 1))))
            apart = np.bincount((found[:, i] - found[:, j]) % length, minlength=length)
            assert apart[0] == 0
            if length > 2:
                yield chi_square(apart[1:], len(words) / (length - 1))


@pytest.mark.parametrize("length", slow_but([5, 8], [2, 5, 8, 64, 101, 9973]))
def test_positions_and_pairs_are_uniform_over_keys_and_over_epochs(length):
    assert min(p_values(words_of(KEYS), 3, length)) > LEVEL


@pytest.mark.parametrize("length", [5, 101])
def test_the_epochs_of_one_key_are_as_uniform_as_keys(length):
    words, positions = jnp.asarray(words_of(1)[0]), jnp.array([0, 1, length - 1], jnp.int32)
    of_one = lambda epoch: permute(words, epoch, positions, length)
    found = np.asarray(jax.jit(jax.vmap(of_one))(jnp.arange(KEYS, dtype=jnp.int32))).astype(np.int64)
    for i in range(3):
        assert chi_square(np.bincount(found[:, i], minlength=length), KEYS / length) > LEVEL
        following = np.bincount((found[1:, i] - found[:-1, i]) % length, minlength=length)
        assert chi_square(following, (KEYS - 1) / length) > LEVEL


def test_all_permutations_of_few_rows_are_equally_likely():
    found = drawn(words_of(KEYS), 0, np.arange(5), 5) @ 5 ** np.arange(5)
    _, counts = np.unique(found, return_counts=True)
    assert len(counts) == 120
    assert chi_square(counts, KEYS / 120) > LEVEL


@pytest.mark.parametrize(("length", "rounds"), [(101, 6), (2048, 2)])
def test_fewer_rounds_are_seen(length, rounds, monkeypatch):
    monkeypatch.setattr(_permute, "num_rounds", lambda side: rounds)
    assert min(p_values(words_of(KEYS), 3, length)) < LEVEL


# Orders in runs


@pytest.mark.parametrize("sizes", slow_but([(7, 3)], [(64, 16), (70, 32), (5, 5), (7, 3), (10, 9)]))
def test_batches_are_cut_from_an_endless_stream_of_permutations(sizes):
    length, batch_size = sizes
    words = jnp.asarray(words_of(1, seed=length)[0])
    whole = np.concatenate([plain_permutation(words, epoch, length) for epoch in range(20)])
    steps, shape = 4, {"length": length, "batch_size": batch_size}
    touched = (steps * batch_size - 1) // length + 2
    for step in (0, 1, 5, 11):
        found = stream(words, jnp.int32(step), steps=steps, permutations=touched, **shape)
        expected = whole[step * batch_size : (step + steps) * batch_size].reshape(steps, batch_size)
        np.testing.assert_array_equal(found, expected)


SEEDS, ROWS, EPOCHS, BATCH, RATE = 50, 100, 4, 10, 0.25


def linear_data():
    generator = np.random.default_rng(2)
    x = generator.standard_normal((ROWS, 3))
    y = np.where(np.arange(ROWS) < ROWS // 2, 1.0, -1.0) * (1 + x[:, 0]) + 0.3 * generator.standard_normal(ROWS)
    return x.astype(np.float32), y.astype(np.float32)


def plain_losses(orders):
    """The final losses of gradient descent on a linear model, by NumPy, for `orders(seed, epoch)`."""
    x, y = linear_data()
    losses = []
    for seed in range(SEEDS):
        weights = np.zeros(3)
        for epoch in range(EPOCHS):
            for rows in orders(seed, epoch).reshape(-1, BATCH):
                weights -= RATE * 2 / BATCH * x[rows].T @ (x[rows] @ weights - y[rows])
        losses.append(np.mean((x @ weights - y) ** 2))
    return np.array(losses)


@pytest.mark.slow
def test_training_is_as_with_permutations_of_numpy():
    x, y = linear_data()
    generator = np.random.default_rng(3)
    expected = plain_losses(lambda seed, epoch: generator.permutation(ROWS))

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    make = lambda key: jax.tree.map(jnp.zeros_like, eqx.nn.Linear(3, 1, use_bias=False, key=key))
    ensemble, options = ee.build(make, SEEDS, key=KEY), {"epochs": EPOCHS, "batch_size": BATCH, "key": KEY}
    final = lambda run: np.mean((np.asarray(ee.predict(run.ensemble, x))[..., 0] - y) ** 2, axis=1)
    found = final(ee.fit(ensemble, loss, optax.sgd(RATE), (x, y), **options))
    assert stats.ks_2samp(found, expected).pvalue > LEVEL
    assert stats.ttest_ind(found, expected).pvalue > LEVEL
    assert stats.levene(found, expected).pvalue > LEVEL
    given = final(ee.fit(ensemble, loss, optax.sgd(RATE), (x, y), shuffle=False, **options))
    np.testing.assert_allclose(given, plain_losses(lambda seed, epoch: np.arange(ROWS)), rtol=1e-4)
    assert stats.ks_2samp(given, expected).pvalue < LEVEL  # which sees an order that is not random
