import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

LOGITS = jax.random.normal(jax.random.key(0), (3, 40, 4))
LABELS = np.arange(40) % 4
PROBABILITIES = jax.nn.softmax(LOGITS)

TAKE_LOGITS = {
    "nll": lambda p: ee.scores.nll(p, LABELS),
    "brier": lambda p: ee.scores.brier(p, LABELS),
    "ece": lambda p: ee.scores.ece(p, LABELS),
    "accuracy": lambda p: ee.scores.accuracy(p, LABELS),
    "mixture": lambda p: ee.combine.mixture(p),
    "entropy": lambda p: ee.uncertainty.entropy(p[0]),
    "decompose_entropy": lambda p: ee.uncertainty.decompose_entropy(p),
}
TAKE_VOTES = {
    "vote": lambda p: ee.combine.vote(p),
    "mean_member_accuracy": lambda p: ee.scores.mean_member_accuracy(p, LABELS),
    "disagreement": lambda p: ee.uncertainty.pairwise_disagreement(p),
}


@pytest.mark.parametrize("kind", ["jax", "NumPy", "one row"])
@pytest.mark.parametrize("name", TAKE_LOGITS)
def test_probabilities_are_told_from_logits(name, kind):
    if kind == "one row" and name not in ("mixture", "entropy", "decompose_entropy"):
        return
    values = {"jax": PROBABILITIES, "NumPy": np.asarray(PROBABILITIES), "one row": PROBABILITIES[:, :1]}[kind]
    with pytest.warns(UserWarning, match=r"takes logits, but every row of these sums to 1"):
        TAKE_LOGITS[name](values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_in_every_precision(dtype):
    with pytest.warns(UserWarning, match="takes logits"):
        ee.combine.mixture(PROBABILITIES.astype(dtype))


@pytest.mark.parametrize("values", [LOGITS, jnp.log(PROBABILITIES), jnp.zeros((3, 40, 4)), jnp.full((3, 40, 4), 0.25)])
@pytest.mark.parametrize("name", TAKE_LOGITS)
def test_logits_are_quiet(name, values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TAKE_LOGITS[name](values)


@pytest.mark.parametrize("name", TAKE_VOTES)
def test_votes_are_quiet(name):
    np.testing.assert_array_equal(TAKE_VOTES[name](PROBABILITIES), TAKE_VOTES[name](LOGITS))


def test_nothing_is_read_while_tracing():
    np.testing.assert_allclose(eqx.filter_jit(ee.combine.mixture)(PROBABILITIES).shape, (40, 4))


def test_one_hot_logits_are_quiet():
    assert ee.combine.mixture(np.eye(4, dtype=np.float32)[LABELS][None]).shape == (40, 4)


def test_one_distribution_of_many_classes():
    logits = jax.random.normal(jax.random.key(0), (100,))
    assert np.isfinite(ee.uncertainty.entropy(logits))
    with pytest.warns(UserWarning, match="takes logits"):
        ee.uncertainty.entropy(jax.nn.softmax(logits))
