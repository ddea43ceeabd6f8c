"""The peak memory of predictions within a budget, as JSON: a process of its own, so that nothing that
other tests freed is used again unseen.
"""

import json
import sys

import equinox as eqx
import jax
import numpy as np

import eqx_ensemble as ee

BUDGET = 64 * 2**20


def main(benchmarks):
    sys.path.insert(0, benchmarks)
    from _memory import peak

    needed = {}
    for members in (8, 32):
        ensemble = ee.build(lambda key: eqx.nn.MLP(3, 10, 128, 2, key=key), members, key=jax.random.key(0))
        for count in (10_000, 60_000):
            x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
            run = lambda ensemble=ensemble, x=x: ee.predict(
                ensemble, x, combine=ee.uncertainty.decompose_entropy, batch_size=16_384, memory=BUDGET
            )
            for _ in range(2):  # the first compiles, and where that showed, the second takes larger blocks
                jax.block_until_ready(run())
            needed[f"{members} members, {count} rows"] = peak(run) - 3 * 4 * count  # the result
    needed["without a budget"] = peak(lambda: ee.predict(ensemble, x, batch_size=16_384))
    print(json.dumps(needed))


if __name__ == "__main__":
    main(*sys.argv[1:])
