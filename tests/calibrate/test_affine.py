import json
import pathlib

import jax
import numpy as np
import pytest

from eqx_ensemble import calibrate, combine, scores

optimize = pytest.importorskip("scipy.optimize", reason="the reference minimum is scipy's")

STORED = json.loads((pathlib.Path(__file__).parents[1] / "scores" / "figures.json").read_text())
LOGITS, LABELS = (np.asarray(STORED["data"][name]) for name in ("logits", "labels"))
# Log-probabilities that are not far apart: many steps of an optimiser are not the matter here.
SMALL = LOGITS / 4


def _scipys(log_p, labels, apply, start, penalty=lambda params: 0.0):
    """The smallest loss that scipy finds, with NumPy's arithmetic and its own gradient by differences."""

    def loss(params):
        z = apply(log_p, params)
        nll = np.logaddexp.reduce(z, axis=-1) - np.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
        return nll.mean() + penalty(params)

    return optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})


def _by_vector(log_p, params):
    return log_p * params[:4] + params[4:]


def _by_matrix(log_p, params):
    return log_p @ params[:16].reshape(4, 4).T + params[16:]


def test_vector_is_scipys_minimum():
    log_p = np.float64(combine.mixture(SMALL))
    want = _scipys(log_p, LABELS, _by_vector, np.r_[np.ones(4), np.zeros(4)])
    with jax.enable_x64(True):
        fitted = calibrate.vector(SMALL, LABELS, pool="mixture")
        np.testing.assert_allclose(scores.nll(fitted(SMALL), LABELS), want.fun, rtol=1e-8)
        # A number added to every offset changes nothing: compare what they predict.
        z = _by_vector(log_p, want.x)
        np.testing.assert_allclose(fitted(SMALL)[0], z - np.logaddexp.reduce(z, axis=-1, keepdims=True), atol=2e-4)
        assert scores.nll(SMALL, LABELS) > want.fun + 1e-2
        assert scores.nll(calibrate.temperature(SMALL, LABELS, pool="mixture")(SMALL), LABELS) > want.fun + 1e-3
    single = calibrate.vector(SMALL.astype(np.float32), LABELS, pool="mixture")
    np.testing.assert_allclose(scores.nll(single(SMALL), LABELS), want.fun, rtol=1e-5)


def test_matrix_is_scikit_learns_logistic_regression():
    with jax.enable_x64(True):
        fitted = calibrate.matrix(LOGITS, LABELS, pool="mixture")
        want = np.asarray(STORED["figures"]["matrix: probabilities"])
        np.testing.assert_allclose(np.exp(fitted(LOGITS)[0]), want, rtol=1e-4, atol=1e-6)
        lowest = -np.log(np.take_along_axis(want, LABELS[:, None], -1)).mean()
        np.testing.assert_allclose(scores.nll(fitted(LOGITS), LABELS), lowest, rtol=1e-8)
        vector = calibrate.vector(LOGITS, LABELS, pool="mixture")(LOGITS)
        assert scores.nll(vector, LABELS) > lowest + 1e-3
        assert not np.allclose(np.exp(vector[0]), want, rtol=1e-1)
    single = calibrate.matrix(LOGITS.astype(np.float32), LABELS, pool="mixture")
    np.testing.assert_allclose(scores.nll(single(LOGITS), LABELS), lowest, rtol=1e-5)


@pytest.mark.parametrize("off_diagonal", [0.1, 10.0])
def test_penalties_are_those_of_the_definition(off_diagonal):
    log_p, off = np.float64(combine.mixture(SMALL)), ~np.eye(4, dtype=bool)
    penalty = lambda p: off_diagonal * np.mean(p[:16].reshape(4, 4)[off] ** 2) + 0.3 * np.mean(p[16:] ** 2)
    want = _scipys(log_p, LABELS, _by_matrix, np.r_[np.eye(4).ravel(), np.zeros(4)], penalty)
    with jax.enable_x64(True):
        fitted = calibrate.matrix(SMALL, LABELS, pool="mixture", off_diagonal_penalty=off_diagonal, bias_penalty=0.3)
        found = np.asarray(fitted.coefficients)[0]
        got = np.r_[np.ravel(found[:, :4]), found[:, 4]]
        nll = float(scores.nll(fitted(SMALL), LABELS))
    np.testing.assert_allclose(nll + penalty(got), want.fun, rtol=1e-7)
    np.testing.assert_allclose(got, want.x, atol=1e-3)
    assert np.abs(found[:, :4][off]).max() < 1 / off_diagonal


def test_a_large_penalty_makes_vector_scaling():
    with jax.enable_x64(True):
        matrix = calibrate.matrix(SMALL, LABELS, pool="mixture", off_diagonal_penalty=1e7)(SMALL)
        vector = calibrate.vector(SMALL, LABELS, pool="mixture")(SMALL)
        np.testing.assert_allclose(matrix, vector, atol=1e-3)
        assert not np.allclose(calibrate.matrix(SMALL, LABELS, pool="mixture")(SMALL), vector, atol=1e-2)


@pytest.mark.parametrize("fit", [calibrate.vector, calibrate.matrix])
def test_members_are_calibrated_each_alone(fit):
    together = fit(SMALL, LABELS, pool="members")(SMALL)
    alone = fit(SMALL[1:2], LABELS, pool="mixture")(SMALL[1:2])
    # L-BFGS in float32 ends where the value no longer falls, a thousandth from the minimum.
    np.testing.assert_allclose(together[1], alone[0], atol=5e-3)
    assert not np.allclose(together[0], alone[0], atol=1e-1)


def test_offsets_of_logits_change_nothing():
    fitted = calibrate.matrix(SMALL, LABELS, pool="members")
    offset = np.float32(SMALL) + np.float32(100) * np.arange(80, dtype=np.float32)[:, None]
    np.testing.assert_allclose(fitted(offset), fitted(SMALL), atol=1e-2)
    again = calibrate.matrix(offset, LABELS, pool="members")
    np.testing.assert_allclose(scores.nll(again(SMALL), LABELS), scores.nll(fitted(SMALL), LABELS), rtol=1e-4)


def test_masked_rows_change_nothing():
    mask = np.arange(80) % 4 > 0
    spoilt, labels = SMALL.copy(), LABELS.copy()
    spoilt[:, ~mask], labels[~mask] = np.nan, -7
    got = calibrate.vector(spoilt, labels, pool="mixture", row_weights=mask)(SMALL)
    want = calibrate.vector(SMALL[:, mask], LABELS[mask], pool="mixture")(SMALL)
    np.testing.assert_allclose(got, want, atol=5e-3)
    assert not np.allclose(calibrate.vector(SMALL, LABELS, pool="mixture")(SMALL), want, atol=2e-2)


def test_warns_where_there_is_no_minimum():
    sure = np.tile(3 * np.eye(4, dtype=np.float32), (2, 1, 1))
    sure[0, 0] = sure[0, 1]
    with pytest.warns(UserWarning, match="`calibrate.vector`: no minimum was reached"):
        calibrate.vector(sure, np.arange(4), pool="members")


@pytest.mark.filterwarnings("error")
def test_a_penalty_gives_a_minimum_where_rows_can_be_separated():
    # Every class is predicted as the next one: no scales and offsets separate them, a matrix does so without error.
    labels = np.arange(30) % 3
    logits = np.log(np.full((1, 30, 3), 0.1) + 0.7 * np.eye(3)[(labels + 1) % 3]).astype(np.float32)
    fitted = calibrate.matrix(logits, labels, pool="mixture", off_diagonal_penalty=0.01, bias_penalty=0.01)
    np.testing.assert_array_equal(np.argmax(fitted(logits)[0], axis=-1), labels)
    with pytest.warns(UserWarning, match="no minimum was reached"):
        calibrate.matrix(logits, labels, pool="mixture")


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`bias_penalty` to be at least 0 and finite, got -1"):
        calibrate.matrix(SMALL, LABELS, pool="mixture", bias_penalty=-1.0)
