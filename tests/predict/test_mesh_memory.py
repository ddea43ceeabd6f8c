"""`predict(memory=)` on a mesh: blocks have as many members of each device, and the result is that of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble._predict import _batch as _blocks
from eqx_ensemble._predict import _run_work as _block_sizes
from eqx_ensemble._sharding import Layout
from eqx_ensemble.plan import _memory

from ..collectives import collectives, text_of

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (21, 3))
SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*do not divide evenly")


def make(key):
    return eqx.nn.MLP(3, 2, 4, 1, key=key)


def mesh_of(members=4, data=1):
    return ee.make_mesh(members=members, data=data)


@pytest.fixture
def measured(monkeypatch):
    """The blocks that were measured; each is reported to need a MiB for each member of a device and each row."""
    seen, note = [], _block_sizes.BlockSizes.note

    def noted(sizes, need):
        assert need > 0
        seen.append(tuple(sizes.block))
        note(sizes, 2**20 * sizes.block.members * sizes.block.rows)

    monkeypatch.setattr(_block_sizes.BlockSizes, "note", noted)
    return seen


def assert_close(found, want):
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


CASES = {
    "even": (12, {}, {}),
    "combined": (12, {}, {"combine": ee.uncertainty.decompose_entropy, "weights": np.linspace(0, 1, 12)}),
    "a function": (12, {}, {"combine": lambda p: p[2] - p[7]}),
    "uneven": (10, {}, {}),
    "uneven, combined": (10, {}, {"combine": ee.combine.mean, "weights": np.linspace(0, 1, 10)}),
    "fewer than devices": (3, {}, {}),
    "rows apart": (6, {"members": 2, "data": 2}, {"combine": ee.combine.moments}),
    "one by one": (12, {}, {"plan": ee.plan.Sequential()}),
}


@pytest.mark.parametrize("on_it", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("combined", "uneven") else SLOW) for name in CASES]
)
def test_blocks_of_each_device_change_nothing(measured, case, on_it):
    count, shape, options = CASES[case]
    mesh, alone = mesh_of(**shape), ee.build(make, count, key=KEY)
    ensemble = ee.build(make, count, mesh=mesh, key=KEY) if on_it else alone
    want = ee.predict(alone, X, **options | {"plan": None})
    given = {} if on_it else {"mesh": mesh}
    assert_close(ee.predict(ensemble, X, memory=2**20 * 4 + 1, batch_size=8, **given, **options), want)
    assert measured[0][0] == -(-count // mesh.shape["members"])  # of one device
    assert measured[-1] == (1, 2)


@SLOW
def test_inputs_states_and_keys_of_members(measured):
    class Counting(eqx.Module):
        weight: jax.Array
        index: eqx.nn.StateIndex

        def __init__(self, key):
            self.weight = jax.random.normal(key, (3,))
            self.index = eqx.nn.StateIndex(jax.random.normal(key, ()))

    fn = lambda model, x, state, key: x * model.weight + state.get(model.index) + jax.random.normal(key, (3,))
    for count in (8, 6):
        ensemble, state = ee.build(eqx.nn.make_with_state(Counting), count, key=KEY)
        own = ee.Each(jax.random.normal(KEY, (count, 11, 3)))
        options = {"state": state, "key": KEY, "inference": True, "fn": fn}
        want = ee.predict(ensemble, own, **options)
        found = ee.predict(ensemble, own, memory=2**20 * 4 + 1, batch_size=4, mesh=mesh_of(), **options)
        assert_close(found, want)
        assert measured[-1] == (1, 2)


def test_a_block_stays_on_its_devices():
    """Nothing is sent, and every device has its part; by their positions alone, members would be sent."""
    mesh = mesh_of()
    layout, ensemble = Layout(mesh), ee.build(make, 12, mesh=mesh, key=KEY)
    blocks = _blocks.blocks_of_members(12, 2, layout)
    assert [block.tolist() for block in blocks] == [[0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]]
    for block in blocks:
        some = _blocks.take_block(ensemble.stacked, block, layout)
        assert eqx.tree_equal(
            jax.tree.map(np.asarray, eqx.filter(some, eqx.is_array)),
            jax.tree.map(np.asarray, eqx.filter(ensemble[block].stacked, eqx.is_array)),
        )
        assert len({str(shard.index) for shard in jax.tree.leaves(some)[0].addressable_shards}) == 4
    arrays = eqx.filter(ensemble.stacked, eqx.is_array)
    own = lambda tree, start: _blocks._slice_devices(tree, start, 2, layout)
    assert collectives(text_of(own, arrays, jnp.int32(0))) == []
    assert collectives(text_of(lambda tree: jax.tree.map(lambda x: x[blocks[0]], tree), arrays))


def test_uneven_blocks():
    layout = Layout(mesh_of())
    positions = lambda count, size: [x.tolist() for x in _blocks.blocks_of_members(count, size, layout)]
    assert positions(10, 2) == [[0, 1, 3, 4, 6, 7, 9], [2, 5, 8]]
    assert positions(5, 1) == [[0, 2, 4], [1, 3]]
    for count in range(1, 20):
        for size in range(1, 6):
            blocks = _blocks.blocks_of_members(count, size, layout)
            flat = np.concatenate([np.arange(count)[block] for block in blocks])
            assert sorted(flat.tolist()) == list(range(count))
            assert all(0 < -(-len(np.arange(count)[block]) // 4) <= size for block in blocks)


def test_the_device_that_needs_most_counts(monkeypatch):
    """Of several accelerators; the free memory is that of the fullest."""
    uses = iter([[(5, 3), (9, 2)], [(8, 3), (9, 2)]])
    stats = lambda: [{"peak_bytes_in_use": peak, "bytes_in_use": used, "bytes_limit": 10} for peak, used in next(uses)]
    monkeypatch.setattr(_memory, "_device_stats", stats)
    with _memory.peak() as found:
        pass
    assert found.bytes == 5
    uses = iter([[(8, 3), (9, 6)]])
    assert _memory.free_bytes() == 4
