import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx

from .._check import check_function
from .._jaxpr import plain_jit
from .._pytree import PyTree

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
    """Lists the communication between devices in `fn(*args)`, from its compiled program.

    The program is compiled, but not run. A collective in a loop counts once.

    **Arguments:**

    - `fn`: a function of arrays on a mesh; it may take and return any PyTree.
    - `args`: its arguments.

    **Returns:** a list of [`eqx_ensemble.sharding.Collective`][eqx_ensemble.sharding.collectives], in the order of the
    program.

    **Raises:** `TypeError` if `fn` is not a function.

    ```python
    mesh = ee.make_mesh()
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, mesh=mesh, key=key)
    mean_square = ee.map_members(
        lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), mesh=mesh
    )
    ee.sharding.collectives(mean_square, ensemble, jnp.ones((32, 3)))
    # []: members are independent
    ```
    """
    check_function(fn, "fn", name="sharding.collectives", example="lambda ensemble, x: ensemble(x)")
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
