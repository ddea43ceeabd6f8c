import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

metrics = pytest.importorskip("sklearn.metrics", reason="the reference scores are scikit-learn's")

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _data(shape=(5, 40, 4), seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    logits = 2 * rng.normal(size=shape) + 2 * np.eye(shape[-1])[labels]
    return logits.astype(np.float32), labels


def _softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _sklearn(name, probabilities, labels):
    classes = list(range(probabilities.shape[-1]))
    if name == "nll":
        return metrics.log_loss(labels, probabilities, labels=classes)
    if name == "brier":
        return metrics.brier_score_loss(labels, probabilities, labels=classes, scale_by_half=False)
    return metrics.accuracy_score(labels, probabilities.argmax(-1))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", ["nll", "brier", "accuracy"])
def test_is_scikit_learns_score_of_the_mean_probabilities(name, weights):
    if name == "brier" and "labels" not in inspect.signature(metrics.brier_score_loss).parameters:
        pytest.skip("scikit-learn before 1.7 has the Brier score of two classes only")
    logits, labels = _data()
    score, probabilities = getattr(scores, name), np.average(_softmax(logits), axis=0, weights=weights)
    want = _sklearn(name, probabilities, labels)
    np.testing.assert_allclose(score(logits, labels, weights=weights), want, rtol=1e-5)
    assert not np.allclose(score(logits, (labels + 1) % 4, weights=weights), want, rtol=1e-2)
    assert not np.allclose(score(logits[:1], labels), want, rtol=1e-2)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_mean_member_accuracy_is_the_mean_of_scikit_learns(weights):
    logits, labels = _data()
    each = [metrics.accuracy_score(labels, member.argmax(-1)) for member in logits]
    want = np.average(each, weights=weights)
    np.testing.assert_allclose(scores.mean_member_accuracy(logits, labels, weights=weights), want, rtol=1e-6)
    assert not np.allclose(scores.accuracy(logits, labels, weights=weights), want, rtol=1e-2)


def test_closed_forms():
    logits = jnp.log(jnp.array([[[0.9, 0.1, 0.0]], [[0.3, 0.7, 0.0]]]))
    np.testing.assert_allclose(scores.nll(logits, np.array([1])), -np.log(0.4), rtol=1e-6)
    np.testing.assert_allclose(scores.nll(logits, np.array([1]), weights=np.array([1, 0])), -np.log(0.1), rtol=1e-6)
    np.testing.assert_allclose(scores.brier(logits, np.array([1])), 0.6**2 + 0.6**2, rtol=1e-6)
    np.testing.assert_allclose(scores.brier(logits[:1, :, ::2], np.array([1])), 2, rtol=1e-6)  # the worst there is
    assert scores.nll(logits, np.array([2])) == np.inf


def test_nll_far_below_the_smallest_float():
    logits = np.array([[[0.0, -200.0]], [[0.0, -201.0]]], np.float32)
    want = np.log(2) - np.logaddexp(-200.0, -201.0)
    np.testing.assert_allclose(scores.nll(logits, np.array([1])), want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 2), (3, 4, 5, 2)])
def test_rows_of_any_shape(shape):
    logits, labels = _data(shape)
    for score in (scores.nll, scores.brier, scores.accuracy, scores.mean_member_accuracy):
        rows = score(logits, labels, reduction="none")
        assert rows.shape == shape[1:-1]
        np.testing.assert_allclose(np.mean(rows), score(logits, labels), rtol=1e-6)
        flat = score(logits.reshape(3, -1, 2), labels.reshape(-1), reduction="none")
        np.testing.assert_allclose(np.reshape(rows, -1), flat, rtol=1e-6)


def test_ties_go_to_the_lowest_class():
    logits = np.zeros((2, 1, 3), np.float32)
    assert scores.accuracy(logits, np.array([0])) == 1
    assert scores.accuracy(logits, np.array([1])) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_labels_of_any_integer_type(dtype):
    logits, labels = _data((2, 6, 300))
    labels = labels % 100
    for score in (scores.nll, scores.brier, scores.accuracy):
        np.testing.assert_array_equal(score(logits, labels.astype(dtype)), score(logits, labels))


def test_traced_labels_out_of_range_are_nan_and_not_another_class():
    logits, labels = _data((2, 4, 3))
    labels[:] = [-1, 3, 2, 0]
    for score in (scores.nll, scores.brier, scores.accuracy):
        rows = jax.jit(lambda l: score(logits, l, reduction="none"))(labels)  # noqa: B023
        np.testing.assert_array_equal(np.isnan(rows), [True, True, False, False])


def test_nan_predictions_are_nan_and_not_right_or_wrong():
    logits, labels = _data((3, 4, 3))
    logits[1, 2] = np.nan
    for score in (scores.nll, scores.brier, scores.accuracy, scores.mean_member_accuracy):
        rows = score(logits, labels, reduction="none")
        np.testing.assert_array_equal(np.isnan(rows), [False, False, True, False])


@pytest.mark.usefixtures("unhooked")
def test_traced_shapes_are_checked():
    logits, labels = _data((3, 6, 4))
    with pytest.raises(ValueError, match="`labels` of the rows of"):
        jax.jit(scores.nll)(logits, labels[:, None])
    with pytest.raises(TypeError, match="integer `labels`"):
        jax.jit(scores.nll)(logits, labels.astype(np.float32))


def test_booleans_are_labels_of_two_classes(unhooked):
    logits, labels = jax.random.normal(jax.random.key(0), (3, 6, 2)), np.arange(6) % 2
    np.testing.assert_array_equal(scores.nll(logits, labels == 1), scores.nll(logits, labels))
