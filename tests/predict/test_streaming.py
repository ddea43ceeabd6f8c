import contextlib
import functools
import importlib
import json
import math
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._predict import _batch as _output
from eqx_ensemble._predict import _run_work as _block_sizes
from eqx_ensemble.plan import _memory

KEY, MEMBERS, ROWS = jax.random.key(0), 5, 11
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0, 1.5])
BENCHMARKS = pathlib.Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), MEMBERS, key=KEY)


def rows(count=ROWS):
    return jax.random.normal(jax.random.key(1), (count, 3))


def assert_close(found, want):
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


COMBINE = {
    "mixture": ee.combine.mixture,
    "decompose_entropy": ee.uncertainty.decompose_entropy,
    "streaming": ee.combine.streaming(ee.uncertainty.decompose_entropy),
    "numpy": lambda p, weights=None: np.average(p, axis=0, weights=weights),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("case", COMBINE)
def test_combined_by_batches_is_combined_on_the_whole(ensemble, case, weights):
    combine = COMBINE[case]
    named = {} if weights is None else {"weights": weights}
    want = combine(ee.predict(ensemble, rows()), **named)
    for batch_size in (4, 256):  # an uneven last batch, and one batch
        assert_close(ee.predict(ensemble, rows(), combine=combine, batch_size=batch_size, **named), want)
    other = ee.predict(ensemble[::-1], rows()[::-1], combine=combine, batch_size=4, **named)
    assert not np.allclose(jax.tree.leaves(other)[0], jax.tree.leaves(want)[0], rtol=1e-3)


class Sum(ee.combine.AbstractCombination):
    """A user's own weighted mean."""

    def update(self, partial, predictions, *, weights=None):
        own = jnp.asarray(weights)
        return self.merge(partial, (jnp.tensordot(own, predictions, 1), jnp.sum(own)))

    def merge(self, first, second):
        return second if first is None else jax.tree.map(jnp.add, first, second)

    def finish(self, partial):
        return partial[0] / partial[1]


@pytest.mark.parametrize("scale", [1e-50, 1e38, 1e50])
def test_weights_outside_float32(ensemble, scale):
    predictions = np.asarray(ee.predict(ensemble, rows()), np.float64)
    of_rows = WEIGHTS[:, None] * np.linspace(1, 2, ROWS)
    for combine, weights in ((ee.combine.mean, WEIGHTS), (Sum(), WEIGHTS), (ee.combine.mean, of_rows)):
        want = np.einsum("mr,mrc->rc", np.broadcast_to(weights.reshape(MEMBERS, -1), (MEMBERS, ROWS)), predictions)
        want /= weights.reshape(MEMBERS, -1).sum(axis=0)[:, None]
        for options in ({}, {"memory": 2**26}):
            found = ee.predict(ensemble, rows(), combine=combine, weights=weights * scale, **options)
            np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_a_function_without_weights_is_called_without(ensemble):
    found = ee.predict(ensemble, rows(), combine=lambda p: jnp.median(p, axis=0), batch_size=4)
    np.testing.assert_allclose(found, np.median(ee.predict(ensemble, rows()), axis=0), rtol=1e-6)


def test_combined_in_a_compiled_program(ensemble):
    combined = lambda ensemble, x, weights: ee.predict(
        ensemble, x, combine=ee.combine.streaming(ee.combine.mean), weights=weights
    )
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    assert_close(eqx.filter_jit(combined)(ensemble, rows(), weights), combined(ensemble, rows(), weights))


def test_differentiable(ensemble):
    def total(x, batch_size):
        return jnp.sum(ee.predict(ensemble, x, combine=ee.combine.mean, batch_size=batch_size) ** 2)

    assert_close(jax.grad(total)(rows(), 4), jax.grad(total)(rows(), 256))


def test_of_a_run(ensemble):
    def loss(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    data = rows(), jnp.zeros((ROWS, 4))
    run = ee.fit(ensemble, loss, optax.sgd(0.1), data, epochs=1, batch_size=ROWS, progress=False, key=KEY)
    want = ee.combine.mean(ee.predict(run.ensemble, rows()), weights=WEIGHTS)
    for options in ({"batch_size": 4}, {"memory": 2**26}):
        assert_close(run.predict(rows(), combine=ee.combine.mean, weights=WEIGHTS, **options), want)


@pytest.fixture
def needing(monkeypatch):
    """A context in which every block is reported to need so many bytes; yields the blocks that were measured."""

    @contextlib.contextmanager
    def said(need):
        seen, note = [], _block_sizes.BlockSizes.note

        def noted(sizes, _):
            seen.append(sizes.block)
            note(sizes, need(sizes.block))

        with monkeypatch.context() as patched:
            patched.setattr(_block_sizes.BlockSizes, "note", noted)
            yield seen

    return said


class LargestGap(ee.combine.AbstractCombination):
    """A user's own: the largest distance between two members' predictions, entry by entry."""

    def update(self, partial, predictions, *, weights=None):
        return self.merge(partial, (jnp.min(predictions, axis=0), jnp.max(predictions, axis=0)))

    def merge(self, first, second):
        if first is None:
            return second
        return jnp.minimum(first[0], second[0]), jnp.maximum(first[1], second[1])

    def finish(self, partial):
        return partial[1] - partial[0]


def mean_and_variance(model, x):
    out = model(x)
    return out, jnp.exp(out)


OPTIONS = {
    "plain": {},
    "own": {"combine": LargestGap()},
    "a partial": {"combine": functools.partial(ee.uncertainty.quantile, levels=0.3), "weights": WEIGHTS},
    "a pair": {"combine": ee.combine.gaussian, "fn": mean_and_variance, "weights": WEIGHTS},
    "the parts of a pair": {"combine": ee.uncertainty.decompose_variance, "fn": mean_and_variance},
    "chunks": {"combine": ee.uncertainty.decompose_entropy, "plan": ee.plan.Chunked(2)},
    "unrolled": {"combine": ee.combine.moments, "plan": ee.plan.Unrolled()},
    "function": {"combine": ee.combine.mixture, "weights": WEIGHTS},
    "a list of weights": {"combine": ee.combine.mixture, "weights": WEIGHTS.tolist()},
    "quantiles": {"combine": ee.combine.QuantileSketch([0.2, 0.5]), "weights": WEIGHTS},
    "auto": {"plan": "auto"},
    "sequential": {"plan": ee.plan.Sequential()},
}


STREAMING = [
    ee.combine.mean, ee.combine.moments, ee.combine.mixture, ee.combine.mean_logits, ee.combine.vote,
    ee.uncertainty.decompose_entropy, ee.uncertainty.disagreement, ee.uncertainty.variation_ratio,
]  # fmt: skip
PAIRS = [ee.combine.gaussian, ee.uncertainty.decompose_variance]


PLANS = [ee.plan.Chunked(2), ee.plan.Sequential(), ee.plan.Unrolled(), "auto"]


@pytest.mark.parametrize(
    ("combine", "plan"),
    [(combine, None) for combine in STREAMING + PAIRS] + [(ee.uncertainty.decompose_entropy, plan) for plan in PLANS],
)
def test_streams_over_members_under_every_plan(ensemble, needing, combine, plan):
    """As the function of the predictions of all members; no call of it sees all of them."""
    fn = mean_and_variance if combine in PAIRS else None
    whole = ee.predict(ensemble, rows(21), fn=fn)
    want = combine(*whole, weights=WEIGHTS) if combine in PAIRS else combine(whole, weights=WEIGHTS)
    options = {"combine": combine, "weights": WEIGHTS, "fn": fn, "plan": plan}
    assert_close(ee.predict(ensemble, rows(21), **options), want)
    with needing(lambda block: 2**20 * block.members * block.rows) as seen:
        found = ee.predict(ensemble, rows(21), memory=2**20 * 4 + 1, batch_size=8, **options)
    assert seen[-1] == (1, 2)
    assert_close(found, want)


@pytest.mark.parametrize("combine", [ee.combine.mixture, ee.uncertainty.decompose_entropy], ids=lambda fn: fn.__name__)
def test_members_are_never_all_held(ensemble, needing, combine, monkeypatch):
    """What the combination is given at a time are the members of a block; a function of all would be given five."""
    form, seen = ee.combine.streaming(combine), set()
    update = type(form).update

    def noted(self, partial, predictions, **named):
        seen.add(predictions.shape[0])
        return update(self, partial, predictions, **named)

    monkeypatch.setattr(type(form), "update", noted)
    with needing(lambda block: 2**20 * block.members * block.rows):
        ee.predict(ensemble, rows(21), memory=2**20 * 4 + 1, batch_size=8, combine=combine)
        assert seen == {5, 1}  # the first, measured block holds all
        function = lambda p: seen.add(("function", p.shape[0])) or combine(p)
        ee.predict(ensemble, rows(21), memory=2**20 * 4 + 1, batch_size=8, combine=function)
    assert seen == {5, 1, ("function", 5)}


@pytest.mark.parametrize("combine", STREAMING, ids=lambda fn: fn.__name__)
def test_all_members_at_hand_are_combined_by_the_function_itself(ensemble, combine):
    found = ee.predict(ensemble, rows(), combine=combine, weights=WEIGHTS)
    want = combine(ee.predict(ensemble, rows()), weights=WEIGHTS)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", OPTIONS)
def test_small_blocks_change_nothing(ensemble, needing, case):
    options = OPTIONS[case]
    want = ee.predict(ensemble, rows(21), **options | {"plan": None})
    for memory, last in ((2**20 * 4 + 1, (1, 2)), (2**20 * 32 + 1, (2, 8))):
        with needing(lambda block: 2**20 * block.members * block.rows) as seen:
            found = ee.predict(ensemble, rows(21), memory=memory, batch_size=8, **options)
        assert seen == [(MEMBERS, 8), last]
        assert_close(found, want)


def test_small_blocks_of_members_with_inputs_state_and_keys_of_their_own(needing):
    class Counting(eqx.Module):
        weight: jax.Array
        index: eqx.nn.StateIndex

        def __init__(self, key):
            self.weight = jax.random.normal(key, (3,))
            self.index = eqx.nn.StateIndex(jax.random.normal(key, ()))

    fn = lambda model, x, state, key: x * model.weight + state.get(model.index) + jax.random.normal(key, (3,))
    ensemble, state = ee.build(eqx.nn.make_with_state(Counting), MEMBERS, key=KEY)
    own = ee.Each(jax.random.normal(KEY, (ROWS, MEMBERS, 3)), axis=1)
    want = ee.predict(ensemble, own, state=state, key=KEY, inference=True, fn=fn)
    with needing(lambda block: 2**20 * block.members * block.rows) as seen:
        found = ee.predict(
            ensemble, own, state=state, key=KEY, inference=True, fn=fn, memory=8 * 2**20 + 1, batch_size=4
        )
    assert seen == [(5, 4), (1, 4)]
    assert_close(found, want)


def test_a_block_grows_to_what_fits(ensemble, needing, monkeypatch):
    monkeypatch.setattr(_block_sizes, "_byte_bound", lambda call, inputs: (lambda block: math.inf, False))
    with needing(lambda block: 2**20 * block.members * block.rows) as seen:
        found = ee.predict(ensemble, rows(200), memory=2**20 * MEMBERS * 64 * 2 + 1)
    assert seen == [(1, 1), (1, 4), (1, 16), (2, 32), (5, 32), (5, 64)]
    assert_close(found, ee.predict(ensemble, rows(200)))


@pytest.mark.parametrize(("members", "most"), [(1, 1), (1, 7), (5, 11), (64, 256), (3, 1000)])
def test_the_ladder(members, most):
    blocks = _block_sizes._ladder(_block_sizes.Block(members, most))
    assert blocks[0] == (members, most)
    assert blocks[-1] == (1, 1)
    cells = [block.members * block.rows for block in blocks]
    assert all(1 < before / after <= 2 for before, after in zip(cells, cells[1:], strict=False))


def test_what_is_known_counts_where_nothing_can_be_seen(ensemble, monkeypatch):
    """A process whose memory cannot be measured: inputs, weights, outputs and the compiler's estimate are known."""
    monkeypatch.setattr(_memory, "_resident", lambda: None)
    x = jnp.zeros((4096, 3))
    copying = lambda model, x: jnp.broadcast_to(model(x), (256, 4))
    seen, note = [], _block_sizes.BlockSizes.note
    monkeypatch.setattr(
        _block_sizes.BlockSizes, "note", lambda sizes, need: (seen.append((sizes.block, need)), note(sizes, need))
    )
    kept = ee.predict(ensemble, x, fn=copying, combine=lambda p: p[0, :, 0], batch_size=4096, memory=2**20)
    assert kept.shape == (4096, 4)
    block, need = seen[-1]
    assert block.members * block.rows * 256 * 4 * 4 <= need <= 2**20


def test_one_row_of_one_member_does_not_fit(ensemble, needing):
    message = r"needs about 3 MiB for one row and one member .* more than `memory=1048576` \(1 MiB\)"
    with needing(lambda _: 3 * 2**20) as seen, pytest.raises(MemoryError, match=message):
        ee.predict(ensemble, rows(30), memory=2**20, batch_size=8)
    assert seen[-1] == (1, 1)


def test_the_result_does_not_fit(ensemble, monkeypatch):
    monkeypatch.setattr(_output, "free_bytes", lambda: MEMBERS * ROWS * 4 * 4 - 1)
    with pytest.raises(MemoryError, match=r"no memory for its result \(5, 11, 4\): 880 bytes.*\n.*decompose_entropy"):
        ee.predict(ensemble, rows(), batch_size=4)
    assert ee.predict(ensemble, rows(), combine=ee.combine.mean, batch_size=4).shape == (ROWS, 4)
    monkeypatch.setattr(_output, "free_bytes", lambda: ROWS * 4 * 4 - 1)
    with pytest.raises(MemoryError, match=r"\(11, 4\): 176 bytes.*\nCall it with some rows"):
        ee.predict(ensemble, rows(), combine=ee.combine.mean, batch_size=4)


def test_a_result_stays_where_its_parts_are(ensemble):
    mesh = jax.make_mesh((4,), ("members",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    spread = ee.concatenate([ensemble, ensemble[:3]], renumber=True)
    want = ee.predict(spread, rows())
    spread = jax.tree.map(lambda x: jax.device_put(x, sharding) if eqx.is_array(x) else x, spread)
    for options in ({"batch_size": 4}, {"memory": 2**26}):
        found = ee.predict(spread, rows(), **options)
        assert {shard.data.shape[0] for shard in found.addressable_shards} == {2}
        assert_close(found, want)
        combined = ee.predict(spread, rows(), combine=ee.combine.mean, **options)
        assert_close(combined, np.mean(want, axis=0))


BAD = {
    "rows": ({"combine": lambda p: jnp.mean(p)}, ValueError, r"returns arrays `\(rows, ...\)`; it gave \(\)"),
    "another axis in front": (
        {"combine": lambda p: jnp.quantile(p, jnp.array([0.1, 0.9]), axis=0)},
        ValueError,
        r"it gave \(2, 16, 4\) for 16 rows.\nTo move an axis",
    ),
    "weights of nothing": ({"weights": WEIGHTS}, TypeError, "takes `weights` for `combine`"),
    "too few weights": ({"combine": ee.combine.mean, "weights": [1.0]}, ValueError, r"expected shape \(5,\)"),
    "zeros": ({"combine": ee.combine.mean, "weights": [0.0] * 5}, ValueError, "not all zero"),
    "a class": (
        {"combine": ee.combine.QuantileSketch},
        TypeError,
        r"Pass `QuantileSketch\(...\)` instead of the class",
    ),
    "no function": ({"combine": "mean"}, TypeError, "a function or a combination, got 'mean'"),
    "no bytes": ({"memory": 0}, ValueError, "`memory` of at least 1"),
    "words": ({"memory": "2 GiB"}, TypeError, "an integer `memory`"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("unhooked")
def test_mistakes(ensemble, case):
    options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        ee.predict(ensemble, rows(), **options)


def test_no_budget_in_a_compiled_program(ensemble):
    with pytest.raises(TypeError, match="impossible inside `jax.jit`"):
        jax.jit(lambda x: ee.predict(ensemble, x, memory=2**20))(rows())


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak of a part of a run"
)
def test_peak_is_flat_in_rows_and_members_and_within_the_budget(monkeypatch):
    """A layer of one batch of all members is 256 MiB, their predictions for all rows 73."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent)
    memory, peaks = importlib.import_module("_memory"), importlib.import_module("peaks")
    command = [sys.executable, peaks.__file__, str(BENCHMARKS)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | memory.GIVE_BACK)
    needed = json.loads(done.stdout)
    whole = needed.pop("without a budget")
    assert len(needed) == 4
    assert max(needed.values()) < peaks.BUDGET, "for 24 times the work the budget is the same"
    assert whole > 4 * peaks.BUDGET
