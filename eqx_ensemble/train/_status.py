import enum

import numpy as np
from jaxtyping import Array, Int8, Shaped


class Status(enum.IntEnum):
    """The status of a member. Arrays of statuses are int8, inside compiled programs and on the host.

    - `OK`: the member is training, or trained to the end.
    - `STOPPED`: `patience`, `stop`, a callback or [`eqx_ensemble.methods.population.stop`][] stopped it.
    - `DIVERGED`: its loss or weights were not finite. It keeps its last finite weights.

    `str(status)` is the name that tables and messages use: `"ok"`, `"stopped"`, `"diverged"`.

    ```python
    status = jnp.array([0, 2, 1], jnp.int8)  # such as `metrics.status`
    status == ee.train.Status.OK  # [True, False, False]
    str(ee.train.Status(status[1]))  # "diverged"
    ```
    """

    OK = 0
    STOPPED = 1
    DIVERGED = 2

    def __str__(self) -> str:
        return self.name.lower()


def status_names(status: Int8[Array | np.ndarray, " members"]) -> Shaped[np.ndarray, " members"]:
    """The names of statuses."""
    return np.array([str(one) for one in Status])[np.asarray(status)]
