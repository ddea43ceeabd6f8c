"""What was fitted in one precision is called in another, with 64-bit types and strict promotion."""

import jax
import numpy as np
import pytest

from eqx_ensemble import conformal, resample

RNG = np.random.default_rng(0)
LOGITS, LABELS = 2 * RNG.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 3
NUMBERS = RNG.normal(size=(4, 40)).astype(np.float32)
TARGETS = RNG.normal(size=40).astype(np.float32)
DRAWN = np.array([np.arange(i, i + 20) for i in (0, 5, 15, 20)])


def _folds():
    return resample.folds(40, 4, key=jax.random.key(0))


def _fit_enbpi():
    return conformal.enbpi(NUMBERS[0], TARGETS, DRAWN, level=0.8)


FITTED = {
    "split": lambda: (conformal.split(NUMBERS[0], TARGETS, level=0.8), [NUMBERS[1]]),
    "normalised": lambda: (
        conformal.normalised(NUMBERS[0], 1 + NUMBERS[2] ** 2, TARGETS, level=0.8),
        [TARGETS**2 + 1] * 2,
    ),
    "cqr": lambda: (conformal.cqr(NUMBERS[0] - 1, NUMBERS[0] + 1, TARGETS, level=0.8), [NUMBERS[1], NUMBERS[1] + 1]),
    "cv_plus": lambda: (conformal.cv_plus(NUMBERS[0], TARGETS, _folds(), level=0.8), [NUMBERS[:, :5]]),
    "jackknife_plus": lambda: (
        conformal.jackknife_plus_after_bootstrap(NUMBERS[0], TARGETS, DRAWN, level=0.8),
        [NUMBERS[:, :5]],
    ),
    "enbpi": lambda: (_fit_enbpi(), [NUMBERS[:, :5]]),
    "enbpi, later": lambda: (_fit_enbpi().update(NUMBERS[:, :5].astype(float), np.zeros(5)), [NUMBERS[:, :5]]),
    "lac": lambda: (conformal.lac(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "aps": lambda: (conformal.aps(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "top_k": lambda: (conformal.top_k(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "class_conditional": lambda: (conformal.class_conditional(LOGITS, LABELS, level=0.8), [LOGITS[:5]]),
    "group_conditional": lambda: (
        conformal.group_conditional(LOGITS, LABELS, LABELS, level=0.8, num_groups=3),
        [LOGITS[:5], LABELS[:5]],
    ),
    "cross_conformal": lambda: (
        conformal.cross_conformal(LOGITS, LABELS, _folds(), level=0.8),
        [np.stack([LOGITS[:5] + i for i in range(4)])],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_another_precision(name):
    with jax.enable_x64(True):
        fitted, arguments = FITTED[name]()
        doubled = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arguments]
        found, want = fitted(*doubled), fitted(*arguments)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
            assert x.dtype == (np.float64 if y.dtype == np.float32 else y.dtype)
