"""Rows that are read when a step needs them: those that it would take of arrays in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.data._reader_source import StepRows
from eqx_ensemble.train.data._rows import row_order
from eqx_ensemble.train.host._loop import Pacing

from ..factories import assert_same, grouped

KEY = jax.random.key(0)
MEMBERS, ROWS, SIZE = 5, 53, 8
EPOCH = 7  # steps, the last of 5 rows
X = np.asarray(jax.random.normal(KEY, (ROWS, 3)))
DATA = X, np.sin(X[:, :1])
SGD = optax.sgd(0.05, momentum=0.9)
OWN = np.random.default_rng(0).integers(0, ROWS, (MEMBERS, 30))


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def numbered(model, batch, key):
    """Says exactly which rows a member saw, in which order."""
    return jnp.dot(batch, 1 + jnp.arange(len(batch), dtype=batch.dtype)) + 0 * jnp.sum(model.weight)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)


SCORE = {"score": mse, "mode": "min"}


class Disk:
    """Arrays on a disk that counts what is read, and fails at some reads."""

    def __init__(self, data, fails=()):
        self.data, self.fails, self.reads = data, list(fails), []

    def __call__(self, rows):
        self.reads.append(rows)
        if len(self.reads) in self.fails:
            self.fails.remove(len(self.reads))
            raise OSError(5, "Input/output error")
        return jax.tree.map(lambda x: x[rows], self.data)

    def reader(self, **options):
        return ee.train.RowReader(self, num_rows=ROWS, **options)


def fitted(begun, data, loss=mse, **options):
    options = {"batch_size": SIZE, "progress": False, "key": KEY} | options
    return ee.fit(begun, loss, SGD, data, **grouped(options))


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shuffle", "own"),
    [(True, OWN), slow(True, None), slow("shared", None), slow("shared", OWN), (False, None), (False, OWN)],
)
def test_the_rows_of_steps_are_those_of_arrays(shuffle, own):
    count = ROWS if own is None else own.shape[1]
    ids = jnp.array([3, 0, 7, 8, 11])
    compiled = row_order(KEY, ids, shuffle, num_rows=ROWS, rows=own, batch_size=SIZE)
    words = compiled.words.value if shuffle is True else compiled.words
    on_host = StepRows(None if words is None else np.asarray(words), own, num_rows=count, batch_size=SIZE)
    assert on_host.is_own == (own is not None or shuffle is True)
    step_of_all = lambda step, last: ee.map_members(lambda order: order.batch(step, last=last))(compiled)
    for step in (0, 1, compiled.epoch - 1, compiled.epoch, 200):
        last = step % compiled.epoch == compiled.epoch - 1
        expected = step_of_all(jnp.int32(step), last) if on_host.is_own else compiled.batch(jnp.int32(step), last=last)
        np.testing.assert_array_equal(on_host.at(step, np.arange(MEMBERS)), expected)
        if on_host.is_own:
            np.testing.assert_array_equal(on_host.at(step, np.array([4, 2])), expected[jnp.array([4, 2])])


@pytest.mark.filterwarnings("ignore")  # five members are padded, and the last batch is uneven
@pytest.mark.parametrize(
    ("shuffle", "own", "mesh"),
    [
        ("shared", OWN, None),
        slow(True, None, None),
        slow("shared", None, None),
        (False, None, None),
        slow(True, None, (4, 1)),
        (True, None, (2, 2)),
        slow("shared", OWN, (4, 1)),
        slow("shared", None, (4, 1)),
        slow("shared", None, (2, 2)),
        slow(False, None, (2, 2)),
    ],
)
def test_members_see_the_rows_of_arrays(ensemble, shuffle, own, mesh):
    numbers = np.arange(ROWS, dtype=np.float32)
    options = {"shuffle": shuffle, "rows": own, "epochs": 2, "loss": numbered}
    options["mesh"] = None if mesh is None else ee.make_mesh(members=mesh[0], data=mesh[1])
    run, in_memory = (fitted(ensemble, data, **options) for data in (Disk(numbers).reader(), numbers))
    assert_same(run.history.loss, in_memory.history.loss)
    if shuffle:
        assert (run.history.loss[:, :4] != run.history.loss[:, -4:]).any()  # another order in each epoch


def test_a_run_equals_that_on_batches_of_the_same_rows(ensemble):
    options = {"validation": DATA, "epochs": 2, "patience": 1}
    run = fitted(ensemble, Disk(DATA).reader(), **options)
    words = jax.random.key_data(ee.member_keys(KEY, MEMBERS, purpose="rows"))
    rows = StepRows(np.asarray(words), None, num_rows=ROWS, batch_size=SIZE)
    taken = [rows.at(step, np.arange(MEMBERS)) for step in range(2 * EPOCH)]
    batches = [ee.Each((DATA[0][at], DATA[1][at])) for at in taken]

    class Epochs:
        done = 0

        def __iter__(self):
            self.done += 1
            return iter(batches[(self.done - 1) * EPOCH : self.done * EPOCH])

    plain = ee.fit(ensemble, mse, SGD, Epochs(), progress=False, key=KEY, **grouped(options))
    assert_same((run.ensemble, run.history, run.selection), (plain.ensemble, plain.history, plain.selection))


def test_memory_is_bounded(ensemble):
    """A read has increasing rows without repeats, never more than those of one batch."""
    disk = Disk(DATA)
    run = fitted(ensemble, disk.reader(), epochs=2, rows=OWN)
    assert len(disk.reads) == 2 * 4  # nothing is read that no step uses
    assert all((np.diff(rows) > 0).all() and len(rows) <= MEMBERS * SIZE for rows in disk.reads)
    assert max(map(len, disk.reads)) < MEMBERS * SIZE  # a row that several members see is read once
    assert run.rows.shape == OWN.shape
    disk = Disk(DATA)
    fitted(ensemble, disk.reader(), steps=3, shuffle="shared")
    assert [len(rows) for rows in disk.reads] == [SIZE] * 3


def test_members_that_stopped_are_not_read(ensemble, monkeypatch):
    monkeypatch.setattr(Pacing, "pays", lambda self, width, before, steps_left: width < before)
    monkeypatch.setattr("eqx_ensemble.train.host._callbacks._SECONDS", 0.0)
    disk, limits = Disk(DATA), np.array([9, 2, 9, 9, 9])
    run = fitted(ensemble, disk.reader(), steps=9, stop=ee.train.Stopping(steps=limits))
    assert run.stopped_at.tolist() == limits.tolist()
    whole = fitted(ensemble, Disk(DATA).reader(), steps=9)
    assert_same(run.ensemble[[0, 2, 3, 4]], whole.ensemble[[0, 2, 3, 4]])
    assert len(disk.reads[-1]) <= (MEMBERS - 1) * SIZE


def test_threads_change_nothing(ensemble):
    one, three = (fitted(ensemble, Disk(DATA).reader(threads=count), epochs=2) for count in (1, 3))
    assert_same(one.train_state, three.train_state)


def test_the_next_batch_is_read_during_a_step(ensemble):
    """A read that waits for the step before it to be begun would wait forever."""
    second, disk = threading.Event(), Disk(DATA)

    def read(rows):
        if len(disk.reads) == 1:
            second.set()
        return disk(rows)

    def wait(progress):
        assert second.wait(60)

    fitted(ensemble, ee.train.RowReader(read, num_rows=ROWS), steps=3, callbacks=ee.train.every(1, wait))


@pytest.mark.parametrize("every", [3, slow(1)])
def test_reads_that_fail_lose_nothing(ensemble, tmp_path, every):
    """Killed by the disk at random steps, the same call ends with the same bits."""
    options = {"validation": DATA, "epochs": 3, "patience": 5, "rows": OWN}
    whole = fitted(ensemble, Disk(DATA).reader(), **options)
    saving = options | {"checkpoint": ee.train.Checkpoint(tmp_path / "run.eqx", every=every)}
    for fail in (2, 6, 3, 4):  # reads of a call, the first of which is the probe
        with pytest.raises(OSError, match="Input/output error") as caught:
            fitted(ensemble, Disk(DATA, [fail]).reader(), **saving)
        assert "It read the batch of step" in "\n".join(caught.value.__notes__)
    run = fitted(ensemble, Disk(DATA).reader(), **saving)
    assert_same((run.train_state, run.history, run.selection), (whole.train_state, whole.history, whole.selection))
    disk = Disk(DATA)
    assert_same(fitted(ensemble, disk.reader(), **saving).ensemble, whole.ensemble)
    assert len(disk.reads) == 1  # a run that is complete reads no batch


def test_an_error_names_the_batch_and_has_the_run(ensemble):
    with pytest.raises(OSError, match="Input/output error") as caught:
        fitted(ensemble, Disk(DATA, [10]).reader(), epochs=3)
    assert "It read the batch of step 10, batch 3 of epoch 2: " in "\n".join(caught.value.__notes__)
    so_far = caught.value.run
    assert int(so_far.train_state.step) == 9
    whole = fitted(ensemble, Disk(DATA).reader(), steps=20)
    assert_same(fitted(so_far, Disk(DATA).reader(), steps=11).train_state, whole.train_state)


def test_runs_continue_in_mid_epoch(ensemble):
    whole = fitted(ensemble, Disk(DATA).reader(), steps=25)
    run = fitted(ensemble, Disk(DATA).reader(), steps=4)
    for steps in (7, 1, 13):
        run = fitted(run, Disk(DATA).reader(), steps=steps)
    assert_same((run.train_state, run.history), (whole.train_state, whole.history))


@pytest.mark.parametrize(
    "options", [slow({"epochs": 3}), {"steps": 17}, slow({"epochs": 3, "stop": ee.train.Stopping(steps=EPOCH)})]
)
def test_validation_is_that_of_arrays(ensemble, options):
    options = options | {"validation": DATA, "patience": 2}
    run, in_memory = (fitted(ensemble, data, **options) for data in (Disk(DATA).reader(), DATA))
    np.testing.assert_allclose(run.history.validation, in_memory.history.validation, rtol=1e-5)
    np.testing.assert_array_equal(run.history.validation_step, in_memory.history.validation_step)
    np.testing.assert_array_equal(run.best_step, in_memory.best_step)
    np.testing.assert_array_equal(run.stopped_at, in_memory.stopped_at)


def test_validation_of_another_structure(ensemble):
    reader = ee.train.RowReader(DATA)
    with pytest.raises(TypeError, match="needs `validation` with the structure of `data`"):
        ee.fit(ensemble, mse, SGD, reader, validation=X, steps=2, key=KEY)


def test_other_data_do_not_resume(ensemble, tmp_path):
    fitted(ensemble, Disk(DATA).reader(), steps=2, checkpoint=tmp_path / "run.eqx")
    with pytest.raises(ValueError, match="data"):
        fitted(ensemble, Disk((X + 1, DATA[1])).reader(), steps=4, checkpoint=tmp_path / "run.eqx")
    with pytest.raises(ValueError, match="rows"):
        fitted(ensemble, Disk(DATA).reader(), rows=OWN, steps=4, checkpoint=tmp_path / "run.eqx")


def test_memory_mapped_arrays_and_wide_numbers(ensemble, tmp_path):
    """Float64 is trained as arrays of float64 are: in the precision of JAX."""
    for name, x in zip("xy", DATA, strict=True):
        np.save(tmp_path / f"{name}.npy", x.astype(np.float64))
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    run = fitted(ensemble, ee.train.RowReader(mapped), steps=3)
    assert run.history.loss.dtype == np.asarray(fitted(ensemble, mapped, steps=3).history.loss).dtype
    if not jax.config.jax_enable_x64:
        assert_same(run.ensemble, fitted(ensemble, Disk(DATA).reader(), steps=3).ensemble)


def test_shards_of_a_fleet(ensemble, tmp_path):
    """Each worker reads for its members; a shard that failed goes on at its batch."""
    options = {"epochs": 2, "rows": OWN, "batch_size": SIZE, "plan": ee.plan.Sequential(), "key": KEY}
    whole = ee.fit(ensemble, mse, SGD, Disk(DATA).reader(), progress=False, **grouped(options))
    disk = Disk(DATA, [7])
    with ThreadPoolExecutor(1) as executor:
        fit = lambda: ee.fleet.fit(
            executor,
            ensemble,
            mse,
            SGD,
            lambda ids: disk.reader(),
            folder=tmp_path,
            shards=2,
            progress=False,
            **grouped(options),
        )
        with pytest.raises(OSError, match="Input/output error") as caught:
            fit()
        run = fit()
    assert "It read the batch of step" in "\n".join(caught.value.__notes__)
    assert_same((run.ensemble.stacked, run.history.loss), (whole.ensemble.stacked, whole.history.loss))
    assert len(disk.reads) < 2 * 2 * 4 + 8


def test_messages(ensemble):
    make = ee.train.RowReader
    reader = lambda read: make(read, num_rows=ROWS)
    for error, text, call in (
        (TypeError, "gives batches in its own order", lambda: make(iter([DATA]))),
        (TypeError, "needs `num_rows` with a function", lambda: make(lambda rows: X[rows])),
        (ValueError, "`num_rows`", lambda: make(lambda rows: X[rows], num_rows=0)),
        (ValueError, "53 rows at `source\\[0\\]`, 50 rows at", lambda: make((X, X[:50]))),
        (TypeError, "`source\\[0\\]` is an `Each`", lambda: make((ee.Each(X), X))),
        (TypeError, "at `source`: a str", lambda: make("x.npy")),
        (TypeError, "at least one array", lambda: make(())),
        (ValueError, "one row per example", lambda: make(np.float32(1))),
        (ValueError, "at least one row", lambda: make(X[:0])),
        (ValueError, "with a function only; got 5 for arrays of 53", lambda: make(X, num_rows=5)),
        (ValueError, "`threads`", lambda: make(X, threads=0)),
        (ValueError, "needs at most 2147483647 rows|at most", lambda: make(lambda rows: rows, num_rows=2**40)),
        (ValueError, "rows, got", lambda: fitted(ensemble, reader(lambda r: X[r[1:]]), steps=1)),
        (ValueError, "of one shape and dtype", lambda: fitted(ensemble, reader(ragged()), steps=2)),
        (TypeError, "takes `scan` only for data in arrays", lambda: fitted(ensemble, make(DATA), steps=1, scan=True)),
        (IndexError, "`rows` from 0 to 52", lambda: fitted(ensemble, make(DATA), steps=1, rows=OWN + 60)),
        (
            TypeError,
            "arrays in its data; at `validation`",
            lambda: fitted(ensemble, DATA, steps=1, validation=make(DATA), **SCORE),
        ),
    ):
        with pytest.raises(error, match=text):
            call()


def ragged():
    calls = []
    return lambda rows: (calls.append(rows), (X[rows][:, : 4 - len(calls)], X[rows]))[1]
