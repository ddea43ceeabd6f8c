from typing import Any

import numpy as np

from ..._check import concrete, is_traced
from ...train import DivergedError


def check_healthy(run: Any, healthy: np.ndarray, *, name: str) -> None:
    """Raises if all members diverged."""
    if not healthy.any():
        raise DivergedError(f"`{name}` needs members that did not diverge: all {len(healthy)} did.", run)


def check_finite_posterior(posterior: Any, ids: Any, *, name: str) -> None:
    """Raises unless curvatures are finite and noise is above zero."""
    values, loss = concrete(posterior.curvature.values), concrete(posterior.loss)
    if values is None or loss is None:
        return
    bad = ~(np.isfinite(values).all(axis=1) & np.isfinite(loss))
    if bad.any():
        raise ValueError(
            f"`{name}` needs finite outputs and derivatives; those of the members {_ids(ids, bad)} are not.\n"
            "Members that diverged? Pass the run instead of its ensemble, or `run.healthy`."
        )
    noise = None if posterior.noise is None else concrete(posterior.noise)
    if noise is not None and not (noise > 0).all():
        raise ValueError(
            f"`{name}` takes the noise from the residuals by default; members {_ids(ids, noise <= 0)} have zero "
            "residuals.\nPass `noise`, the standard deviation of the targets around their means."
        )


def check_called_once(error: Any, *, name: str) -> None:
    """Raises unless the Jacobian of a linear layer is an outer product."""
    host = concrete(error)
    if host is not None and np.isfinite(host).all() and (host > 1e-2).any():
        raise ValueError(
            f'`{name}` with `structure="kron"` needs a linear layer that is called once for each row; this one is '
            'called more often, such as for each token, or its weight is used elsewhere too.\nPass `structure="full"` '
            'or `"diag"`.'
        )


def check_optimum(precision: Any, noise: Any, ids: Any, *, name: str) -> None:
    """Raises unless all optima are inside their brackets."""
    host = concrete(precision)
    if host is None:
        return
    spread = None if noise is None else concrete(noise)
    bad = ~(np.isfinite(host) & (host > 1e-30))
    if spread is not None:
        bad |= ~(np.isfinite(spread) & (spread > 0))
    if bad.any():
        raise ValueError(
            f"`{name}` found no maximum of the marginal likelihood for the members {_ids(ids, bad)}: their selected "
            "weights are zero, or the outputs do not depend on them."
        )


def _ids(ids: Any, chosen: np.ndarray) -> str:
    return ", ".join(map(str, np.asarray(ids)[chosen].tolist())) if not is_traced(ids) else "..."
