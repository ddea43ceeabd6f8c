"""A device computes the row orders of its own members: their shapes in the compiled program of a `fit`."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.compiled._chunk import run_chunk
from eqx_ensemble.train.data import _sources as _arrays

from ..collectives import collectives, text_of

KEY = jax.random.key(0)
X = np.ones((103, 3), np.float32)


class Done(Exception):
    pass


def loss(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def program(monkeypatch, mesh):
    """The text of the program of a `fit` of 8 members in batches of 7, and its row order."""
    found = []

    def look(read, carry):
        found.extend((text_of(run_chunk, read, carry), read[1].order))
        raise Done

    monkeypatch.setattr(_arrays, "compiled_chunk", look)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=KEY, mesh=mesh)
    with pytest.raises(Done):
        ee.fit(
            ensemble, loss, optax.sgd(0.1), X, batch_size=7, epochs=1, mesh=mesh, plan=ee.plan.Vmap(scan=True), key=KEY
        )
    return found


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_of_its_own_members(monkeypatch):
    text, order = program(monkeypatch, ee.make_mesh())
    assert re.search(r"u32\[(1,)?2,7\]", text)  # rows of two members
    assert not re.search(r"[us]32\[8,", text)
    assert {shard.data.shape for shard in order.words.value.addressable_shards} == {(2, 2)}
    assert max(size for _, size in collectives(text)) <= 4  # whether a member failed, and at which step


@pytest.mark.slow
def test_without_a_mesh_of_all(monkeypatch):
    """What the test above would find."""
    assert re.search(r"u32\[8,7\]", program(monkeypatch, None)[0])
