from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .._check import check_positive_int
from ._check import check_all_processes, check_devices, check_num_devices

AXES = ("members", "data", "model")


def make_mesh(
    members: int | None = None,
    data: int = 1,
    model: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of devices with the axes `members`, `data` and `model`, for the `mesh=` of other functions.

    `members` shards the members, which are independent: a step needs no communication over it. `data` splits the rows
    of every batch; gradients are summed over its devices. `model` splits the weights of a member that does not fit on
    one device.

    Devices of one process are adjacent: `data` and `model`, which communicate at every step, stay inside a host as far
    as they fit there, and `members` extends over hosts.

    **Arguments:**

    - `members`: the number of devices over which members are sharded; by default all that the other axes leave.
    - `data`: the number of devices that share the rows of a batch.
    - `model`: the number of devices that share the weights of a member.
    - `devices`: the devices, of which the first `members * data * model` are used; by default those of all processes.

    **Returns:** a `jax.sharding.Mesh` whose axes are all of the type `Auto`, so that the compiler chooses layouts.

    **Raises:** `ValueError` if there are too few devices, or if those used include none of some process; `TypeError`
    for arguments of another type.

    ```python
    mesh = ee.make_mesh()  # all devices, for different members
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=mesh, key=key)
    ee.sharding.visualise(ensemble)
    ```
    """
    found = jax.devices() if devices is None else check_devices(devices)
    check_positive_int(data, "data", name="make_mesh")
    check_positive_int(model, "model", name="make_mesh")
    if members is not None:
        check_positive_int(members, "members", name="make_mesh")
    members = check_num_devices(members, data, model, len(found))
    found = sorted(found, key=lambda device: (device.process_index, device.id)) if devices is None else found
    chosen = found[: members * data * model]
    check_all_processes(chosen, jax.process_count())
    return Mesh(np.array(chosen).reshape(members, data, model), AXES, axis_types=(AxisType.Auto,) * len(AXES))
