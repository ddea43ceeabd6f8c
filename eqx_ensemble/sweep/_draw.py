from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .. import _streams
from .._check import check_key, check_positive_int
from ._check import check_ranges
from ._range import AbstractRange


def draw(ranges: Mapping[str, AbstractRange], num_members: int, *, key: Any) -> dict[str, Shaped[Array, " members"]]:
    """Draws random hyper-parameters, one value per member and name.

    A value depends only on the key, the member's index and the name: adding members or names does not change other
    values.

    **Arguments:**

    - `ranges`: a dictionary from names to ranges: [`eqx_ensemble.sweep.Uniform`][],
        [`eqx_ensemble.sweep.LogUniform`][], [`eqx_ensemble.sweep.Choice`][] or a subclass of
        [`eqx_ensemble.sweep.AbstractRange`][].
    - `num_members`: the number of members.
    - `key`: one threefry key, typed or legacy.

    **Returns:** a dictionary from names to arrays `(members,)`; pass it to [`eqx_ensemble.fit`][] as `hyper`.

    **Raises:** `TypeError` for `ranges` that are empty or not ranges, a count that is not an integer, and an invalid
    key; `ValueError` for a count below one.

    ```python
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1), "momentum": ee.sweep.Uniform(0.8, 1.0)}
    hyper = ee.sweep.draw(ranges, 64, key=key)
    hyper["lr"].shape  # (64,)
    ```

    ??? cite

        Bergstra and Bengio, *Random Search for Hyper-Parameter Optimization*, JMLR 13, 2012.
    """
    check_ranges(ranges, name="sweep.draw")
    check_positive_int(num_members, "num_members", name="sweep.draw")
    check_key(key, name="sweep.draw")
    return {
        name: jnp.asarray([one.draw(g) for g in _streams.generators(key, num_members, purpose=f"sweep {name}")])
        for name, one in ranges.items()
    }
