import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .. import _check


def grid(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Hyper-parameters of one member for every combination of values, as in `itertools.product`.

    ```python
    hyper = ee.grid({"lr": [1e-3, 1e-2], "wd": [0.0, 1e-4, 1e-3]})
    hyper["lr"].shape  # (6,): the last name varies fastest
    ```

    **Arguments:**

    - `values`: for every name the values to combine, `(choices, ...)`.

    **Returns:** for every name its value in each combination, `(members, ...)`: what `fit` takes as `hyper`.

    **Raises:** TypeError for values that are no numbers, ValueError for none.
    """
    arrays = _check.sweep_values(values, name="sweep.grid")
    combinations = np.array(list(itertools.product(*(range(len(x)) for x in arrays.values()))))
    return {name: jnp.asarray(x[combinations[:, i]]) for i, (name, x) in enumerate(arrays.items())}


def zipped(values: Mapping[str, Any]) -> dict[str, Shaped[Array, "members ..."]]:
    """Hyper-parameters of which member `i` gets the `i`-th of each, as in `zip`.

    ```python
    hyper = ee.sweep.zipped({"lr": [1e-3, 1e-2, 1e-1], "clip": [1.0, 0.5, 0.1]})  # three members
    ```

    **Arguments:**

    - `values`: for every name one value per member, `(members, ...)`.

    **Returns:** the same as arrays: what `fit` takes as `hyper`.

    **Raises:** TypeError for values that are no numbers, ValueError for none, `MemberMismatchError` when names disagree
    on the number of members.
    """
    arrays = _check.sweep_values(values, name="sweep.zipped")
    _check.one_length(arrays, name="sweep.zipped")
    return {name: jnp.asarray(x) for name, x in arrays.items()}
