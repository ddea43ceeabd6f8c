from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._caller import caller
from ..._check import is_traced, kind_text, missing_extra_message
from ..._foreign import as_numpy


def check_values(values: Any) -> np.ndarray:
    """Raises unless `values` is an array of real numbers with members. Returns it in double precision."""
    if is_traced(values):
        raise TypeError(f"`{caller()}` cannot be called inside `jax.jit`: ArviZ computes with NumPy.")
    array = as_numpy(values, "values")
    is_real = array.dtype.kind in "iub" or jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim == 0 or not is_real:
        raise TypeError(
            f"`{caller()}` needs an array of real numbers `(members, ...)` as `values`, got {kind_text(values)}."
        )
    return array.astype(np.float64)


def check_chains(chains: Any, num_samples: int) -> tuple[np.ndarray, int]:
    """Raises unless all chains have the same length.

    **Returns:** the indices that sort samples by chain, and the number of chains.
    """
    array = as_numpy(chains, "chains")
    if array.dtype.kind not in "iu" or array.shape != (num_samples,):
        raise TypeError(
            f"`{caller()}` needs one integer for each sample as `chains` ({num_samples},), got {array.dtype} of shape "
            f"{array.shape}.\nOf snapshots: `trajectory.snapshot_owners(run)`."
        )
    found, lengths = np.unique(array, return_counts=True)
    if len(set(lengths.tolist())) > 1:
        listed = ", ".join(f"{chain}: {length}" for chain, length in zip(found, lengths, strict=True))
        raise ValueError(
            f"`{caller()}` needs chains with as many samples each, got {listed}.\nA member that stopped or diverged "
            "has fewer: leave it out, or the first samples of the others."
        )
    length = max(lengths.tolist(), default=0)
    if length < 4:
        raise ValueError(f"`{caller()}` needs chains of at least 4 samples, got {length}.")
    return np.argsort(array, kind="stable"), len(found)


class Diagnostics(NamedTuple):
    r"""Convergence diagnostics of chains, per quantity.

    **Attributes:**

    - `rhat`: the rank-normalised split $\hat R$, the maximum over draws and folded draws. Above 1.01 the chains have
        not converged. NaN for a single chain.
    - `ess_bulk`: the bulk effective sample size of all chains together.
    - `ess_tail`: the tail effective sample size, the minimum over the 5 % and 95 % quantiles.
    """

    rhat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray


def diagnostics(values: Any, chains: Any) -> Diagnostics:
    r"""Rank-normalised split $\hat R$ and effective sample sizes of quantities over several chains, by ArviZ.

    Diagnose predictions rather than weights. Agreement of chains does not detect bias from step sizes, minibatch noise
    and missing modes.

    **Arguments:**

    - `values`: `(members, ...)`, one value of each quantity per sample, such as the result of
        [`eqx_ensemble.predict`][], the samples of each chain in the order in which they were drawn.
    - `chains`: integers `(members,)`: the chain of each sample, for snapshots those of
        [`eqx_ensemble.methods.trajectory.snapshot_owners`][].
        Each chain needs the same number of samples, at least 4.

    **Returns:** [`eqx_ensemble.methods.sampling.Diagnostics`][] of NumPy arrays `(...)`; NaN for quantities that are
    not finite.

    **Raises:** `ImportError` without ArviZ (the extra `sampling`); `ValueError` for chains of different lengths.

    ```python
    predictions = jax.random.normal(key, (4 * 50, 3))  # 4 chains of 50 samples
    found = ee.methods.sampling.diagnostics(predictions, np.arange(200) // 50)
    found.rhat.shape  # (3,)
    ```

    ??? cite
        [Vehtari et al. 2021](https://arxiv.org/abs/1903.08008)
    """
    array = check_values(values)
    order, num_chains = check_chains(chains, len(array))
    try:
        from arviz_stats.base.array import array_stats  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "ArviZ", "sampling")) from error
    axes: Any = {"chain_axis": 0, "draw_axis": 1}
    draws = array[order].reshape(num_chains, -1, *array.shape[1:])
    with np.errstate(invalid="ignore", divide="ignore"):
        found = Diagnostics(
            np.asarray(array_stats.rhat(draws, **axes, method="rank")),
            np.asarray(array_stats.ess(draws, **axes, method="bulk")),
            np.asarray(array_stats.ess(draws, **axes, method="tail", prob=(0.05, 0.95))),
        )
    finite = np.isfinite(draws).all(axis=(0, 1))
    return Diagnostics(*(np.where(finite, x, np.nan) for x in found))
