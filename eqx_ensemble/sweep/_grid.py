import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ._check import check_lengths, check_sweep_values


def grid(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Makes one member per combination of values, like `itertools.product`.

    **Arguments:**

    - `values`: a dictionary from names to the values to combine, `(choices, ...)`.

    **Returns:** a dictionary from names to arrays `(members, ...)`, one value per combination; pass it to
    [`eqx_ensemble.fit`][] as `hyper`.

    **Raises:** `TypeError` for values that are not numbers, `ValueError` for no names or a name without values.

    ```python
    hyper = ee.sweep.grid({"lr": [1e-3, 1e-2], "wd": [0.0, 1e-4, 1e-3]})
    hyper["lr"].shape  # (6,): the last name varies fastest
    ```
    """
    arrays = check_sweep_values(values, name="sweep.grid")
    combinations = np.array(list(itertools.product(*(range(len(x)) for x in arrays.values()))))
    return {name: jnp.asarray(x[combinations[:, i]]) for i, (name, x) in enumerate(arrays.items())}


def zip_values(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Makes member `i` from the `i`-th value of every name, like `zip`.

    **Arguments:**

    - `values`: a dictionary from names to one value per member, `(members, ...)`.

    **Returns:** the dictionary with arrays as values; pass it to [`eqx_ensemble.fit`][] as `hyper`.

    **Raises:** `TypeError` for values that are not numbers, `ValueError` for no names or a name without values,
    `MemberMismatchError` if names disagree on the number of members.

    ```python
    # three members
    hyper = ee.sweep.zip_values({"lr": [1e-3, 1e-2, 1e-1], "clip": [1.0, 0.5, 0.1]})
    ```
    """
    arrays = check_sweep_values(values, name="sweep.zip_values")
    check_lengths(arrays, name="sweep.zip_values")
    return {name: jnp.asarray(x) for name, x in arrays.items()}
