"""Two processes, with two devices each, that save and load together; run by `test_orbax_runs`.

`processes.py FOLDER` prints `done` when everything was as it should be. The environment has the number of the process.
"""

import os
import pathlib
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.checkpoint import _orbax

KEY = jax.random.key


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def spread(tree, sharding):
    """The arrays, of which each process has a part; typed keys by their data."""

    def put(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x)))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(lambda x: put(x) if isinstance(x, jax.Array) else x, tree)


def assert_parts(got, expected):
    """The parts of the arrays on this process are correct."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not isinstance(y, jax.Array):
            assert not eqx.is_array(y) or np.array_equal(x, y)
            continue
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)
        for one, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was not raised")


def everything(folder, rank, whole, by_members):
    """Arrays of every kind, and a description of each."""
    by_columns = NamedSharding(by_members.mesh, PartitionSpec(None, "members"))
    copied = NamedSharding(by_members.mesh, PartitionSpec())
    tree = {
        "ensemble": spread(whole, by_members),
        "keys": ee.Each(spread(jax.random.split(KEY(1), 8), by_members)),
        "copied": spread(jnp.arange(3.0), copied),
        "columns": spread(jnp.arange(32.0).reshape(8, 4), by_columns),
        "local": jnp.arange(5.0),
        "numpy": np.arange(4.0),
        "number": 3,
    }
    ee.save(folder / "all", tree, format="orbax")
    contents = ee.checkpoint.verify(folder / "all")
    assert contents.ids == tuple(range(8))
    assert contents.unchecked == ("['columns']",)
    assert_parts(ee.load(folder / "all", tree), tree)
    like = {**tree, "columns": np.zeros((8, 4), np.float32), "ensemble": whole}
    got = ee.load(folder / "all", like)
    assert eqx.tree_equal(got["ensemble"], whole)
    assert np.array_equal(got["columns"], np.arange(32).reshape(8, 4))
    halves = jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, whole)
    halves = spread(halves, by_members)
    assert_parts(ee.load(folder / "all", {**tree, "ensemble": halves}, cast="like")["ensemble"], halves)
    some = ee.load(folder / "all", {**tree, "ensemble": whole}, members=[1, 6])["ensemble"]
    assert eqx.tree_equal(some, whole[[1, 6]])

    refused(NotImplementedError, lambda: ee.save(folder / "no", tree))
    error = refused(ValueError, lambda: ee.save(folder / "no", {"x": jnp.full(3, rank)}, format="orbax"))
    assert "at `['x']` is not the same in all processes" in str(error)
    if rank == 0:
        (folder / "mine").mkdir()
        (folder / "mine" / "note").write_text("mine")
    error = refused(OSError, lambda: ee.save(folder / "mine", tree, format="orbax"))
    assert isinstance(error, FileExistsError) == (rank == 0)
    assert ("another process (0)" in str(error)) == (rank == 1)


def run(folder, rank, ensemble):
    """A run with retention, and the fallback from damage that one process detects."""
    flags = jax.tree.map(eqx.is_array, ensemble)
    checkpoints = ee.checkpoint.Checkpoints(folder / "run", format="orbax", last=2, asynchronous=True)
    for step in range(4):
        checkpoints.save(step, (ensemble, step), per_member=(flags, False), ids=ensemble.ids)
    checkpoints.wait()
    assert checkpoints.steps == [2, 3]
    restored = checkpoints.restore((ensemble, 0))
    assert restored.tree[1] == 3
    assert_parts(restored.tree[0], ensemble)

    # What only the second process finds damaged, once: the first one goes back as well.
    digests, calls = _orbax.digests, []

    def wrong_once(leaf, *, per_member):
        calls.append(leaf)
        found = digests(leaf, per_member=per_member)
        return dict.fromkeys(found, bytes(32)) if rank == 1 and len(calls) == 1 else found

    _orbax.digests = wrong_once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoints.restore((ensemble, 0)).step == 2
    _orbax.digests = digests
    (said,) = [str(warning.message) for warning in caught if "went back to step 2" in str(warning.message)]
    assert ("another process (1)" in said) == (rank == 0)
    assert ("the checksum does not match" in said) == (rank == 1)
    assert checkpoints.restore((ensemble, 0)).step == 3


def main(folder, rank):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(num_processes=2, process_id=rank, cluster_detection_method="deactivate")
    by_members = NamedSharding(Mesh(np.array(jax.devices()), ("members",)), PartitionSpec("members"))
    whole = ee.build(make, 8, key=KEY(0))
    everything(folder, rank, whole, by_members)
    run(folder, rank, spread(whole, by_members))
    print("done")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(os.environ["RANK"]))
