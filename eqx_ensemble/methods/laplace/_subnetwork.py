from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..._axes import Each
from ..._check import kind_text
from ...plan._map import map_members
from ._check import check_subnetwork, check_subnetwork_size
from ._laplace import Laplace
from ._member import LaplaceMember


def subnetwork(posterior: Laplace[Any], count: int) -> Each:
    """Selects the weights of each member with the largest posterior variance, as `indices` for another fit.

    A diagonal approximation over all weights thus selects those of a full one. Weights that affect no output of the
    training rows, such as those of dead ReLU units, have the largest variance, that of the prior.

    **Arguments:**

    - `posterior`: the result of [`eqx_ensemble.methods.laplace.fit`][] with `structure="diag"` or `"full"`.
    - `count`: the number of weights to select per member.

    **Returns:** an [`eqx_ensemble.Each`][] of integers `(members, count)`, in the order of the fitted weights.

    **Raises:** `TypeError` for the posterior of a layer (`"kron"`); `ValueError` unless `count` is from 1 to the number
    of weights.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (50, 2)), jnp.zeros((50, 1))
    options = {"likelihood": "regression", "where": lambda model: model, "noise": 0.1}
    laplace = ee.methods.laplace
    diagonal = laplace.fit(ensemble, data, structure="diag", **options)
    indices = laplace.subnetwork(diagonal, 10)
    posterior = laplace.fit(ensemble, data, indices=indices, **options)
    ```

    ??? cite

        Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato, "Bayesian Deep Learning via Subnetwork Inference"
        (ICML 2021).
    """
    name = "methods.laplace.subnetwork"
    if not isinstance(posterior, Laplace):
        raise TypeError(f"`{name}` needs what `methods.laplace.fit` returned, got {kind_text(posterior)}.")
    selection = posterior.members.stacked.posterior.selection
    check_subnetwork(selection, name=name)
    values = posterior.members.stacked.posterior.curvature.values
    count = check_subnetwork_size(count, values.shape[-1], name=name)

    def choose(member: LaplaceMember) -> Int[Array, " weights"]:
        own = member.posterior
        found = jnp.sort(jax.lax.top_k(own.curvature.variance(own.precision), count)[1])
        indices = getattr(own.selection, "indices", None)
        return found if indices is None else indices[found]

    return Each(map_members(choose)(posterior.members))
