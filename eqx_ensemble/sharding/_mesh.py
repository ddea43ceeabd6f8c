import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .._check import check_function, check_positive_int
from .._jaxpr import plain_jit
from .._pytree import PyTree
from ._check import check_devices, check_num_devices

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_FOUND = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")
_BITS = re.compile(r"[0-9]+")


class Collective(NamedTuple):
    """One collective operation between devices in a compiled program.

    **Attributes:**

    - `kind`: the operation, such as `"all-reduce"`.
    - `bytes`: the size of its result on one device.
    """

    kind: str
    bytes: int


def collectives(fn: Callable[..., Any], *args: PyTree) -> list[Collective]:
    """Lists the communication between devices in `fn(*args)`, which is compiled, but not run.

    **Arguments:**

    - `fn`: a function of arrays on a mesh.
    - `args`: its arguments.

    **Returns:** a list of [`eqx_ensemble.sharding.Collective`][eqx_ensemble.sharding.collectives], in the order of the
    program; one in a loop counts once.

    **Raises:** `TypeError` if `fn` is not a function.

    ```python
    mesh = ee.make_mesh()
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, mesh=mesh, key=key)
    call = ee.map_members(lambda model, x: jax.vmap(model)(x), mesh=mesh)
    ee.sharding.collectives(call, ensemble, jnp.ones((32, 3)))
    # []: members are independent
    ```
    """
    check_function(fn, "fn", example="lambda ensemble, x: ensemble(x)")
    return in_text(compiled_text(fn, *args))


def compiled_text(fn: Callable[..., Any], *args: PyTree) -> str:
    """The text of the optimised program of `fn(*args)` for one device."""
    arrays, rest = eqx.partition(args, eqx.is_array)

    def on_arrays(arrays: PyTree) -> PyTree:
        return eqx.filter(fn(*eqx.combine(arrays, rest)), eqx.is_array)

    return plain_jit(on_arrays).lower(arrays).compile().as_text() or ""


def in_text(text: str) -> list[Collective]:
    """The collectives in a compiled program's text."""
    return [Collective(found["kind"], _bytes(found["shape"])) for found in _FOUND.finditer(text)]


def _bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in _ARRAY.findall(shapes):
        bits = _BITS.search(dtype)
        sizes = [int(size) for size in dims.split(",") if size]
        total += math.prod(sizes) * (int(bits[0]) if bits else 8) // 8
    return total


AXES = ("members", "data", "model")


def make_mesh(
    members: int | None = None, data: int = 1, model: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of devices with the axes `members`, `data` and `model`, for the `mesh=` of other functions.

    `data` and `model`, which communicate at every step, stay inside a host as far as they fit there.

    **Arguments:**

    - `members`: the number of devices over which members are sharded; by default all that the other axes leave.
    - `data`: the number of devices that share the rows of a batch, and sum their gradients.
    - `model`: the number of devices that share the weights of a member that does not fit on one.
    - `devices`: the devices, of which the first `members * data * model` are used; by default those of all processes.

    **Returns:** a `jax.sharding.Mesh` whose axes are all of the type `Auto`.

    **Raises:** `ValueError` if there are too few devices, or if those used include none of some process; `TypeError`
    for arguments of another type.

    ```python
    mesh = ee.make_mesh()  # all devices, for different members
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=mesh, key=key)
    ee.sharding.visualise(ensemble)
    ```
    """
    found = jax.devices() if devices is None else check_devices(devices)
    check_positive_int(data, "data")
    check_positive_int(model, "model")
    if members is not None:
        check_positive_int(members, "members")
    members = check_num_devices(members, data, model, len(found))
    found = sorted(found, key=lambda device: (device.process_index, device.id)) if devices is None else found
    chosen = found[: members * data * model]
    num_processes = jax.process_count()
    there = {device.process_index for device in chosen}
    if len(there) < num_processes:
        missing = sorted(set(range(num_processes)) - there)
        raise ValueError(
            f"`make_mesh` needs devices of all {num_processes} processes, and the first {len(chosen)} include none of "
            f"process {', '.join(map(str, missing))}.\nAsk for more devices, or start fewer processes."
        )
    return Mesh(np.array(chosen).reshape(members, data, model), AXES, axis_types=(AxisType.Auto,) * len(AXES))
