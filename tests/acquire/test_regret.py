import jax
import numpy as np
import pytest

from eqx_ensemble import acquire

VALUES = np.random.default_rng(0).normal(size=(4, 9))


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("shape", [(), (4,), (4, 9)])
def test_regret_is_what_a_loop_counts(mode, shape):
    optimum = np.full(shape, 3.0) + np.arange(np.prod(shape, dtype=int)).reshape(shape) / 10
    best = np.broadcast_to(optimum.reshape(shape + (1,) * (2 - len(shape))), VALUES.shape)
    lost = (best - VALUES) if mode == "max" else (VALUES - best)
    got = jax.jit(lambda x: acquire.regret(x, optimum, mode=mode))(VALUES)
    for run in range(4):
        for step in range(9):
            np.testing.assert_allclose(got.simple[run, step], min(lost[run, : step + 1]), rtol=1e-5)
            np.testing.assert_allclose(got.cumulative[run, step], sum(lost[run, : step + 1]), rtol=1e-5)
    if not shape:
        seen = np.maximum.accumulate(VALUES, axis=1) if mode == "max" else -np.minimum.accumulate(VALUES, axis=1)
        np.testing.assert_allclose(got.simple, (3 if mode == "max" else -3) - seen, rtol=1e-5)
    rewards = acquire.regret(np.array([0, 1, 0]), 1, mode="max")
    np.testing.assert_array_equal(rewards.cumulative, [1, 1, 2])


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(
        ValueError, match=r"needs one `optimum`, or one per run or step.\n  expected \(4, 9\), \(4,\) or"
    ):
        acquire.regret(VALUES, np.zeros(9), mode="max")
    with pytest.raises(ValueError, match="`acquire.regret` needs `values` without NaN"):
        acquire.regret([1.0, np.nan], 1.0, mode="max")
    with pytest.raises(ValueError, match="`acquire.regret` needs a finite `optimum`"):
        acquire.regret(VALUES, np.inf, mode="max")
