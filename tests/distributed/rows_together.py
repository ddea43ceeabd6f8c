"""What one of two processes reads of a data set that is larger than its memory; run by `test_rows`."""

import os
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

NUMBERS = np.arange(53, dtype=np.float32)
OWN = np.arange(4 * 20).reshape(4, 20) % 53


def numbered(model, batch, key):
    """Says exactly which rows a member saw, in which order."""
    return jnp.dot(batch, 1 + jnp.arange(len(batch), dtype=batch.dtype)) + 0 * jnp.sum(model.weight)


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    rank = int(os.environ["RANK"])
    jax.distributed.initialize(num_processes=2, process_id=rank, cluster_detection_method="deactivate")
    key = jax.random.key(0)
    for members, data in ((4, 1), (1, 4), (2, 2)):
        mesh, reads = ee.make_mesh(members=members, data=data), []

        def read(rows, reads=reads):
            reads.append(rows)
            return NUMBERS[rows]

        ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, mesh=mesh, key=key)
        for shuffle, own in ((True, None), ("shared", OWN), ("shared", None)):
            options = {"shuffle": shuffle, "rows": own, "epochs": 2, "batch_size": 8, "progress": False, "key": key}
            fit = lambda data, ensemble=ensemble, options=options: ee.fit(
                ensemble, numbered, optax.sgd(0.1), data, **options
            )
            reads.clear()
            run, in_memory = fit(ee.train.RowReader(read, num_rows=53)), fit(NUMBERS)
            np.testing.assert_array_equal(run.history.loss, in_memory.history.loss)
            size = 8 if own is None and shuffle == "shared" else 20  # of 32: the last batch, of 5 rows, is not split
            assert max(map(len, reads)) <= size, (members, shuffle, max(map(len, reads)))
    reader = ee.train.RowReader(NUMBERS)
    with pytest.raises(ValueError, match="process"):
        ee.fit(ensemble, numbered, optax.sgd(0.1), reader, rows=(OWN + rank) % 53, steps=1, progress=False, key=key)


if __name__ == "__main__":
    main()
    print("done")
    sys.stdout.flush()
