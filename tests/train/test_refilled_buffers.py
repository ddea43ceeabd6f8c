"""Buffers that their owner overwrites after a call, while the device still has to read them.

The oracle is the same call with buffers that are left alone.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._foreign import empty_aligned

KEY = jax.random.key(0)
ROWS, BATCH = 32, 8
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.int64)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(4, 1, key=key), 4, key=KEY)
OPTIMISER = optax.sgd(0.1)
MESH = ee.make_mesh(members=2, data=2)


def slow(x):
    """Zero, after some milliseconds of a device."""
    full = jnp.broadcast_to(x, (200, 200))
    return 0 * jax.lax.fori_loop(0, 4, lambda _, y: y @ full / (1 + jnp.abs(y).max()), full)[0, 0]


def loss(model, batch, key):
    x, y = batch
    x = x + slow(model.bias[0])  # read late
    return jnp.mean((jax.vmap(model)(x) - y.astype(x.dtype)) ** 2)


class Buffers:
    """Batches in buffers, each call's own unless `refilled`."""

    def __init__(self, dtypes, *, refilled):
        self.arrays = [X.astype(dtypes[0]), Y.astype(dtypes[1])]
        self.refilled, self.buffers = refilled, None

    def read(self, rows):
        if self.buffers is None or not self.refilled:
            self.buffers = [empty_aligned((len(rows), *x.shape[1:]), x.dtype) for x in self.arrays]
        for buffer, x in zip(self.buffers, self.arrays, strict=True):
            buffer[: len(rows)] = x[rows]
        return tuple(buffer[: len(rows)] for buffer in self.buffers)

    def __iter__(self):
        return (self.read(np.arange(start, start + BATCH)) for start in range(0, ROWS, BATCH))


SOURCES = {
    "iterable": lambda buffers: (buffers, {}),
    "iterable on a mesh": lambda buffers: (buffers, {"mesh": MESH}),
    "reader": lambda buffers: (
        ee.train.RowReader(buffers.read, num_rows=ROWS),
        {"shuffle": False, "batch_size": BATCH},
    ),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "dtypes",
    [
        ("f4", "i8"),
        pytest.param(("f4", "i4"), marks=pytest.mark.slow),
        pytest.param(("f8", "f4"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_fit_trains_on_the_batches_that_it_was_given(source, dtypes):
    def losses(refilled):
        data, options = SOURCES[source](Buffers(dtypes, refilled=refilled))
        return ee.fit(ENSEMBLE, loss, OPTIMISER, data, epochs=1, key=KEY, progress=False, **options).history.loss

    np.testing.assert_array_equal(losses(refilled=True), losses(refilled=False))


STEP = ee.train.make_step(loss, OPTIMISER)


@eqx.filter_jit
def later(state):
    """The same state, which is not ready for a while."""
    wait = sum(slow(state.params.bias[0, 0] + i) for i in range(4))
    return jax.tree.map(lambda x: x + wait if eqx.is_inexact_array(x) else x, state)


def test_a_step_reads_its_batch_as_it_was():
    state = ee.train.init(ENSEMBLE, OPTIMISER, key=KEY)
    x, y = empty_aligned((BATCH, 4), np.float32), np.zeros((BATCH, 1), np.int32)

    def after(refilled):
        x[:] = X[:BATCH]
        out = STEP(later(state), (x, y))[1].loss
        if refilled:
            x[:] = -100
        return np.asarray(out)

    want = after(refilled=False)
    for _ in range(3):
        np.testing.assert_array_equal(after(refilled=True), want)
