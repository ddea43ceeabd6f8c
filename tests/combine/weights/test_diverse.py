import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

diverse = ee.combine.weights.diverse


def random_similarity(seed, members=7, rank=7):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(members, rank)) + 1
    return points @ points.T / rank, rng.uniform(0.5, 2, members)


def greedy_by_determinants(matrix, count):
    chosen = []
    for _ in range(count):
        left = [i for i in range(len(matrix)) if i not in chosen]
        chosen.append(max(left, key=lambda i: np.linalg.slogdet(matrix[np.ix_([*chosen, i], [*chosen, i])])[1]))
    return sorted(chosen)


@pytest.mark.parametrize("seed", range(4))
def test_each_step_has_the_largest_determinant(seed):
    similarity, quality = random_similarity(seed)
    for count in (1, 3, 6):
        for q in (None, quality.astype(np.float32)):
            weights = diverse(similarity.astype(np.float32), count, quality=q)
            scale = np.ones(7) if q is None else quality
            expected = greedy_by_determinants(scale[:, None] * similarity * scale, count)
            assert np.flatnonzero(weights).tolist() == expected
            np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_the_most_similar_members_are_another_choice():
    """The control: of all triples the chosen one is not the least diverse."""
    similarity, _ = random_similarity(0)
    volume = {three: np.linalg.det(similarity[np.ix_(three, three)]) for three in itertools.combinations(range(7), 3)}
    chosen = tuple(np.flatnonzero(diverse(similarity.astype(np.float32), 3)).tolist())
    assert volume[chosen] > 0.8 * max(volume.values())
    assert volume[chosen] > 2 * np.median(list(volume.values()))


def test_copies_come_last():
    logits = jax.random.normal(jax.random.key(0), (3, 50, 4))
    copies = logits[jnp.array([0, 0, 1, 1, 2])]
    similarity = 1 - ee.uncertainty.pairwise_disagreement(copies)
    assert np.flatnonzero(diverse(similarity, 3)).tolist() == [0, 2, 4]
    assert np.flatnonzero(diverse(similarity, 4)).tolist() == [0, 1, 2, 4]
    assert np.flatnonzero(diverse(similarity, 5)).tolist() == [0, 1, 2, 3, 4]


def test_quality_and_diversity_are_weighed():
    similarity = jnp.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert np.flatnonzero(diverse(similarity, 2)).tolist() == [0, 2]
    assert np.flatnonzero(diverse(similarity, 2, quality=jnp.array([1.0, 1.0, 0.1]))).tolist() == [0, 1]
    assert np.flatnonzero(diverse(similarity, 2, quality=jnp.array([1.0, 1.0, 0.6]))).tolist() == [0, 2]


def test_inside_jit_and_in_half_precision():
    similarity, _ = random_similarity(1)
    expected = diverse(similarity.astype(np.float32), 3)
    np.testing.assert_array_equal(jax.jit(lambda s: diverse(s, 3))(similarity.astype(np.float32)), expected)
    assert diverse(jnp.eye(4, dtype=jnp.bfloat16), 2).dtype == jnp.float32


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (jnp.ones((3, 2)), 2),
            r"`combine.weights.diverse` needs `similarity` \(members, members\).\n  got shape \(3, 2\)",
        ),
        ((jnp.eye(3), 4), "`count` of at most the number of members.\n  got 4 of 3"),
        ((1 - jnp.eye(3), 2), "semi-definite `similarity`.\n  got one that is not\nA matrix of disagreements"),
        ((jnp.eye(3).at[0, 1].set(0.5), 2), "needs a symmetric"),
        ((jnp.eye(3).at[0, 0].set(jnp.nan), 2), "needs a finite `similarity`"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        diverse(*arguments)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("quality", [[1.0, 2.0], [1.0, -1.0, 1.0], [1.0, jnp.nan, 1.0]])
def test_mistakes_of_quality(quality):
    with pytest.raises(ValueError, match="`combine.weights.diverse` needs .*`quality`"):
        diverse(jnp.eye(3), 2, quality=jnp.array(quality))
