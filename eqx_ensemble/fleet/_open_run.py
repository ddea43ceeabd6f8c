import os
from typing import Any

from .._files._check import check_like_given
from .._files._like import as_like
from ..checkpoint._path import as_path
from ..checkpoint._read import read_manifest
from ._check_saved import check_has_call, check_like_of_members, check_some_members
from ._folder import has_call, read_call, store_of
from ._sharded_run import ShardedRun, run_of_columns


def open_run(folder: str | os.PathLike[str], like: Any) -> ShardedRun[Any]:
    """Opens a folder in which [`eqx_ensemble.fleet.fit`][] saved members, of a complete or incomplete run.

    **Arguments:**

    - `folder`: the argument `save` of that call.
    - `like`: as for [`eqx_ensemble.load`][]: the function that makes one member from a key, or an ensemble of such
        members (for stateful members a pair of an ensemble and its state), of any number.

    **Returns:** [`eqx_ensemble.fleet.ShardedRun`][], with the members of the completed shards.

    **Raises:** `FileNotFoundError` if `fleet.fit` saved nothing in the folder; `ValueError` if no shard is complete, or
    if files do not belong to the run; `TypeError` for an invalid `like`.

    ```python
    import tempfile
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    make = lambda key: eqx.nn.Linear(3, 1, key=key)
    data, folder = (jnp.ones((64, 3)), jnp.zeros((64, 1))), f"{tempfile.mkdtemp()}/run"
    with ThreadPoolExecutor(2) as executor:
        ee.fleet.fit(
            executor, ee.build(make, 8, key=key), mse, optax.adam(1e-2), data, epochs=1, save=folder, key=key
        )
    run = ee.fleet.open_run(folder, make)
    run.load(ids=[5, 2]).ids  # [5, 2]
    ```
    """
    name = "fleet.open_run"
    path = as_path(folder)
    check_has_call(path, there=has_call(path), name=name)
    check_like_given(like, name=name)
    call = read_call(path, name=name)
    stores = [store_of(path, number, call.identity.digest) for number in range(len(call.sizes))]
    done = {number: store.read(name=name) for number, store in enumerate(stores) if store.is_complete}
    check_some_members(len(done), path, name=name)
    first = store_of(path, min(done), "").path
    return run_of_columns(
        path,
        call,
        done,
        check_like_of_members(as_like(like, read_manifest(first)), name=name),
        lost=(),
        interrupted=False,
        seconds=0.0,
    )
