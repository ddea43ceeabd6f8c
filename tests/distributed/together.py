"""What one of two processes, with two devices each, sees; run by `test_arrays`."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee


def arrays(rank):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("members", "data"))
    spread = lambda x, *axes: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, PartitionSpec(*axes)), lambda index: x[index]
    )
    numbers = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    x = spread(numbers, ("members", "data"))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), ("members", "data")),
            mesh=mesh,
            in_specs=PartitionSpec(("members", "data")),
            out_specs=PartitionSpec(),
        )
    )(x)
    keys = jax.random.split(jax.random.key(3), 4)
    data = spread(np.asarray(jax.random.key_data(keys)), "members")
    backwards = Mesh(np.array(jax.devices())[::-1], ("members",))
    tree = {
        "x": x,
        "total": total,
        "keys": jax.random.wrap_key_data(data),
        "local": jnp.full(2, rank),
        "columns": spread(np.arange(4, dtype=np.int8)[None], None, "data"),
        "backwards": jax.device_put(numbers[:4], NamedSharding(backwards, PartitionSpec("members"))),
        "numpy": np.arange(3),
        "rest": (jnp.sin, "text", 3),
    }
    got = ee.distributed.to_host(tree)
    assert all(type(leaf) is np.ndarray for name in tree if name != "rest" for leaf in [got[name]])
    np.testing.assert_array_equal(got["x"], numbers)
    np.testing.assert_array_equal(got["total"], numbers.sum())
    np.testing.assert_array_equal(got["keys"], jax.random.key_data(keys))
    np.testing.assert_array_equal(got["local"], [rank, rank])
    np.testing.assert_array_equal(got["columns"], [[0, 1, 2, 3]])
    assert got["columns"].dtype == np.int8
    np.testing.assert_array_equal(got["backwards"], numbers[:4])
    assert got["rest"] == tree["rest"]
    half = NamedSharding(Mesh(np.array(jax.local_devices()), ("members",)), PartitionSpec("members"))
    mine = jax.device_put(np.arange(2), half)
    np.testing.assert_array_equal(ee.distributed.to_host(mine), np.arange(2))


def decisions(rank):
    for value in [True, False, 0, -3, 2**62 + 1, 0.1, float("inf"), np.float32(0.5), np.bool_(True), jnp.int32(7)]:
        got = ee.distributed.broadcast_from_first(
            value if rank == 0 else jnp.int32(0) if isinstance(value, jax.Array) else type(value)(0)
        )
        expected = value if isinstance(value, bool | int | float) else value.item()
        assert got == expected
        assert type(got) is type(expected)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    rank = int(os.environ["RANK"])
    jax.distributed.initialize(num_processes=2, process_id=rank, cluster_detection_method="deactivate")
    assert ee.distributed.is_first() == (rank == 0)
    arrays(rank)
    decisions(rank)
    print("done")
