"""What holds for every calibration: jit, files, shapes, precisions."""

import inspect

import jax
import numpy as np
import pytest

import eqx_ensemble as ee

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=50)
LOGITS = (3 * RNG.normal(size=(2, 50, 3)) + 2 * np.eye(3)[LABELS]).astype(np.float32)
KINDS = ["temperature", "vector", "matrix", "isotonic", "histogram", "platt", "beta"]


def _fitted(kind, pool):
    if kind == "isotonic":
        pytest.importorskip("sklearn")
    return getattr(ee.calibrate, kind)(LOGITS, LABELS, pool=pool)


def test_no_kind_is_left_out():
    functions = {name for name, value in vars(ee.calibrate).items() if inspect.isfunction(value)}
    assert functions == {*KINDS, "variance"}


@pytest.mark.parametrize("pool", ["members", "mixture"])
@pytest.mark.parametrize("kind", KINDS)
def test_calling(kind, pool):
    fitted = _fitted(kind, pool)
    eager = np.asarray(fitted(LOGITS))
    assert eager.shape == ((2 if pool == "members" else 1), 50, 3)
    assert eager.dtype == np.float32
    np.testing.assert_allclose(np.exp(eager).sum(-1), 1, rtol=1e-5)
    traced = jax.jit(lambda fitted, x: fitted(x))(fitted, LOGITS)
    np.testing.assert_allclose(np.exp(traced), np.exp(eager), rtol=1e-4, atol=1e-6)
    shaped = fitted(LOGITS.reshape(2, 5, 10, 3))
    np.testing.assert_allclose(np.exp(shaped).reshape(eager.shape), np.exp(eager), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.exp(fitted(LOGITS[:, 7])), np.exp(eager[:, 7]), rtol=1e-4, atol=1e-6)
    before = LOGITS if pool == "members" else ee.combine.mixture(LOGITS)[None]
    likelier = [ee.scores.per_member(ee.scores.nll, x, LABELS) for x in (eager, before)]
    assert (likelier[0] < likelier[1] - 1e-3).all()


@pytest.mark.parametrize("kind", [*KINDS, "variance"])
def test_saving(kind, tmp_path):
    weights = np.array([1.0, 3.0])
    if kind == "variance":
        arguments = LOGITS[..., 0], np.exp(LOGITS[..., 1]), LOGITS[0, :, 2]
        fitted = ee.calibrate.variance(*arguments, pool="mixture", weights=weights)
    else:
        _fitted(kind, "mixture")
        arguments = LOGITS, LABELS
        fitted = getattr(ee.calibrate, kind)(*arguments, pool="mixture", weights=weights)
    ee.save(tmp_path / "fitted", fitted)
    blank = jax.tree.map(jax.numpy.ones_like, fitted)
    loaded = ee.load(tmp_path / "fitted", blank)
    called = fitted(*arguments[:-1])
    for got, want in zip(jax.tree.leaves(loaded(*arguments[:-1])), jax.tree.leaves(called), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(jax.tree.leaves(blank(*arguments[:-1]))[-1], jax.tree.leaves(called)[-1])


@pytest.mark.parametrize("kind", ["temperature", "vector", "histogram", "platt"])
@pytest.mark.parametrize("label", [-1, 3])
def test_rows_without_a_class_are_left_out_while_tracing(kind, label):
    fit, labels = getattr(ee.calibrate, kind), LABELS.copy()
    labels[::5] = label
    got = jax.jit(lambda y: fit(LOGITS, y, pool="mixture")(LOGITS))(labels)
    want = fit(LOGITS, LABELS, pool="mixture", row_weights=labels == LABELS)(LOGITS)
    alike = lambda found: np.isclose(np.exp(found), np.exp(want), atol=1e-4).all(axis=-1).mean()
    assert alike(got) >= 0.97  # a row on the edge of a bin of equal mass may fall to either side by rounding
    last = fit(LOGITS, np.where(labels == LABELS, labels, 2), pool="mixture")(LOGITS)
    assert alike(last) < 0.9
