from typing import Any, NamedTuple

import numpy as np

from ..._caller import caller
from ..._check import missing_extra_message
from ._check import check_chains, check_values


class Diagnostics(NamedTuple):
    r"""Convergence diagnostics of chains, per quantity.

    **Attributes:**

    - `rhat`: the rank-normalised split $\hat R$, the maximum over draws and folded draws. Values above 1.01 indicate
        that the chains have not converged. NaN for a single chain.
    - `ess_bulk`: the bulk effective sample size of all chains together.
    - `ess_tail`: the tail effective sample size, the minimum over the 5 % and 95 % quantiles.
    """

    rhat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray


def diagnostics(values: Any, chains: Any) -> Diagnostics:
    r"""Rank-normalised split $\hat R$ and effective sample sizes of quantities over several chains.

    They are computed by ArviZ, which the extra `sampling` installs. Diagnose outputs of the members, such as their
    predictions, rather than their weights: permuting hidden units changes the weights but not the function. Agreement
    between chains does not imply that they sample from the posterior: bias from step sizes, minibatch noise and missing
    modes is not detected.

    **Arguments:**

    - `values`: `(members, ...)`, one value of each quantity per sample, such as the result of
        [`eqx_ensemble.predict`][]. The samples of each chain must be in the order in which they were drawn.
    - `chains`: `(members,)`, integers: the chain of each sample. For [`eqx_ensemble.methods.path.snapshot_ensemble`][]
        it is `ensemble.ids // size`. All chains must have the same number of samples, at least 4.

    **Returns:** [`eqx_ensemble.methods.sampling.Diagnostics`][] of NumPy arrays `(...)`; NaN for quantities that are
    not finite in all samples, and for $\hat R$ of quantities that are constant.

    **Raises:** `ImportError` without ArviZ; `TypeError` inside `jax.jit`, and for values or chains of the wrong type;
    `ValueError` for chains of different lengths or with fewer than 4 samples.

    ```python
    predictions = jax.random.normal(key, (4 * 50, 3))  # 4 chains of 50 samples
    found = ee.methods.sampling.diagnostics(predictions, np.arange(200) // 50)
    found.rhat.shape  # (3,)
    ```

    ??? cite

        Vehtari, Gelman, Simpson, Carpenter and Bürkner, "Rank-Normalization, Folding, and Localization: An Improved
        $\hat R$ for Assessing Convergence of MCMC" (Bayesian Analysis, 2021).
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
