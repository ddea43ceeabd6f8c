"""Diagnostics of chains, as ArviZ computes them, of samples in the order of an ensemble."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble.methods.sampling import diagnostics

CHAINS, DRAWS = 4, 250
needs_arviz = lambda: pytest.importorskip("arviz_stats", reason="needs the extra `sampling`")


def autoregressive(phi, seed=0, num_draws=DRAWS):
    """Chains `(chains, draws)` of unit variance."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((CHAINS, num_draws))
    chains = [steps[:, 0]]
    for t in range(1, num_draws):
        chains.append(phi * chains[-1] + np.sqrt(1 - phi**2) * steps[:, t])
    return np.stack(chains, axis=1)


def members(chains):
    """The samples as members, and the chain of each."""
    return chains.reshape(-1, *chains.shape[2:]), np.repeat(np.arange(len(chains)), chains.shape[1])


# arviz-stats 0.8.0, `array_stats.rhat` and `.ess(method="bulk" | "tail", prob=(0.05, 0.95))`
FIGURES = [1.0882397736993554, 42.04310784912898, 211.12358055657114]


def test_stored_figures_of_arviz():
    needs_arviz()
    chains = autoregressive(0.8)
    chains[0] += 0.5
    found = diagnostics(*members(chains))
    np.testing.assert_allclose(found, FIGURES, rtol=1e-6)


def test_effective_sample_size_of_autoregressive_chains():
    """Of a mean it is n (1 - phi) / (1 + phi)."""
    needs_arviz()
    for phi in (0.0, 0.5, 0.9):
        chains = autoregressive(phi, num_draws=5000)
        found = diagnostics(*members(chains))
        np.testing.assert_allclose(found.ess_bulk, chains.size * (1 - phi) / (1 + phi), rtol=0.15)
        assert found.rhat < 1.01


def test_samples_in_any_order_of_chains():
    """Chains may be interleaved and have any numbers; only the order within each counts."""
    needs_arviz()
    values, chains = members(autoregressive(0.8))
    plain = diagnostics(values, chains)
    order = np.argsort(np.tile(np.arange(DRAWS), CHAINS), kind="stable")
    mixed = diagnostics(jnp.asarray(values[order]), np.array([7, 3, 11, 5])[chains[order]])
    np.testing.assert_allclose(mixed, plain, rtol=1e-5)
    shuffled = np.random.default_rng(0).permutation(len(values))
    assert diagnostics(values[shuffled], chains).ess_bulk > 3 * plain.ess_bulk  # what a wrong order looks like


def test_quantities_keep_their_shape():
    needs_arviz()
    values, chains = members(np.stack([autoregressive(0.5, seed=i) for i in range(6)], axis=-1))
    one_by_one = [diagnostics(values[:, i], chains) for i in range(6)]
    together = diagnostics(values.reshape(-1, 2, 3), chains)
    assert together.rhat.shape == (2, 3)
    np.testing.assert_allclose(np.reshape(together, (3, 6)), np.transpose(one_by_one))


def test_chains_that_disagree():
    """In location, and in scale alone, which only the folded draws show."""
    needs_arviz()
    for change in (lambda chains: chains + np.arange(4)[:, None], lambda chains: chains * [[1], [1], [1], [4]]):
        assert diagnostics(*members(change(autoregressive(0.0)))).rhat > 1.1


def test_numbers_that_are_not_finite():
    needs_arviz()
    values, chains = members(np.stack([autoregressive(0.5, seed=i) for i in range(3)], axis=-1))
    plain = diagnostics(values, chains)
    values[7, 0], values[9, 1] = np.nan, np.inf
    found = diagnostics(values, chains)
    assert np.isnan(found).tolist() == [[True, True, False]] * 3
    np.testing.assert_array_equal(np.asarray(found)[:, 2], np.asarray(plain)[:, 2])
    assert np.isnan(diagnostics(np.ones(40), np.arange(40) // 10).rhat)
    alone = diagnostics(values[:DRAWS, 2], np.zeros(DRAWS, int))
    assert np.isnan(alone.rhat)
    assert alone.ess_bulk > 10


def test_precision_of_large_offsets():
    """Ranks do not cancel: an offset that float32 still resolves changes nothing."""
    needs_arviz()
    values, chains = members(np.round(autoregressive(0.5) * 64) / 64)
    moved = diagnostics(jnp.asarray(values + 4096, jnp.float32), chains)
    np.testing.assert_allclose(moved, diagnostics(values, chains), rtol=1e-6)
    half = diagnostics(jnp.asarray(values, jnp.bfloat16), chains)
    np.testing.assert_allclose(half, diagnostics(values, chains), rtol=0.05)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("values", "chains", "error", "message"),
    [
        (np.ones(8), np.arange(8.0) // 4, TypeError, "one integer for each sample as `chains` \\(8,\\), got float64"),
        (np.ones(8), np.arange(6) // 3, TypeError, "of shape \\(6,\\)"),
        (np.ones(9), np.arange(9) // 5, ValueError, "as many samples each, got 0: 5, 1: 4"),
        (np.ones(6), np.arange(6) // 3, ValueError, "at least 4 samples, got 3"),
        (np.ones(0), np.ones(0, int), ValueError, "at least 4 samples, got 0"),
        (np.ones(8, complex), np.arange(8) // 4, TypeError, "real numbers"),
        (np.float32(3), np.arange(8) // 4, TypeError, "`\\(members, ...\\)` as `values`"),
        (["a"] * 8, np.arange(8) // 4, TypeError, "real numbers"),
    ],
)
def test_invalid_arguments(values, chains, error, message):
    with pytest.raises(error, match=message):
        diagnostics(values, chains)


@pytest.mark.usefixtures("unhooked")
def test_inside_jit():
    with pytest.raises(TypeError, match="cannot be called inside `jax.jit`"):
        jax.jit(lambda x: diagnostics(x, np.arange(8) // 4))(jnp.ones(8))


def test_without_arviz(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats", None)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"`methods.sampling.diagnostics` needs ArviZ.\nInstall it: .*\[sampling\]"):
        diagnostics(np.ones(8), np.arange(8) // 4)
