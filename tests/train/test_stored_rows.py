"""Rows in files, with the libraries that read them; and in other processes."""

import pickle

import equinox as eqx
import numpy as np
import pytest

import eqx_ensemble as ee

from ..factories import assert_same
from .test_row_reader import DATA, KEY, MEMBERS, ROWS, Disk, fitted

fit = lambda ensemble, data, **options: fitted(ensemble, data, **{"steps": 9} | options)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)


def test_mapped_files_travel_by_name(ensemble, tmp_path):
    for name, x in zip("xy", DATA, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    x, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    sent = pickle.dumps(ee.train.RowReader({"x": x, "y": y}, threads=2))
    assert len(sent) < 1000
    back = pickle.loads(sent)
    assert (back.num_rows, back.threads) == (ROWS, 2)
    at = np.array([0, 7, 52])
    np.testing.assert_array_equal(back.read(at)["x"], DATA[0][at])
    np.testing.assert_array_equal(back.read(at)["y"], DATA[1][at])
    with pytest.raises(TypeError, match="pickles memory-mapped arrays by file name"):
        pickle.dumps(ee.train.RowReader(x[1:]))


def test_zarr(ensemble, tmp_path):
    zarr = pytest.importorskip("zarr", reason="reads rows of Zarr arrays")
    stored = []
    for name, x in zip("xy", DATA, strict=True):
        stored.append(zarr.create_array(tmp_path / f"{name}.zarr", data=x, chunks=(8, x.shape[1])))
    run = fit(ensemble, ee.train.RowReader(tuple(stored)))
    assert_same(run.train_state, fit(ensemble, Disk(DATA).reader()).train_state)


def test_parquet(ensemble, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="reads rows of Parquet files")
    pq = pytest.importorskip("pyarrow.parquet", reason="reads rows of Parquet files")
    columns = dict(zip("abcd", [*DATA[0].T, DATA[1][:, 0]], strict=True))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=10)
    file = pq.ParquetFile(tmp_path / "rows.parquet")

    def read(rows):
        groups = np.unique(rows // 10)
        table = file.read_row_groups(groups.tolist())
        x = np.column_stack([table[name] for name in "abcd"])
        rows = np.searchsorted(groups, rows // 10) * 10 + rows % 10
        return x[rows, :3], x[rows, 3:]

    run = fit(ensemble, ee.train.RowReader(read, num_rows=file.metadata.num_rows))
    assert_same(run.train_state, fit(ensemble, Disk(DATA).reader()).train_state)


class Cut:
    """A loader of grain that fails before a batch, and then no more."""

    def __init__(self, loader, fail):
        self.loader, self.left = loader, fail

    def __iter__(self):
        return CutIterator(iter(self.loader), self.left)


class CutIterator:
    def __init__(self, iterator, left):
        self.iterator, self.left = iterator, left
        self.get_state, self.set_state = iterator.get_state, iterator.set_state

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        return next(self.iterator)


def test_a_loader_of_grain_resumes(ensemble, tmp_path):
    """Three passes of one stream: batches are not drawn again that were drawn before the kill."""
    grain = pytest.importorskip("grain", reason="reads batches")
    drawn = []

    def mark(index, batch):
        drawn.append(index)
        return ee.Each(tuple(np.stack([x] * MEMBERS) for x in batch))

    source = grain.MapDataset.source(list(zip(*DATA, strict=True))).seed(0).shuffle().repeat(3).batch(10)
    loader = source.map_with_index(mark).to_iter_dataset(grain.ReadOptions(num_threads=0))
    options = {"batch_size": None, "steps": None, "epochs": 1}
    whole = fit(ensemble, loader, **options)
    count = len(drawn)
    drawn.clear()
    saving = options | {"checkpoint": ee.train.Checkpoint(tmp_path / "run.eqx", every=1)}
    for fail in (4, 5):
        with pytest.raises(OSError, match="Input/output error"):
            fit(ensemble, Cut(loader, fail), **saving)
    run = fit(ensemble, loader, **saving)
    assert_same(run.train_state, whole.train_state)
    assert len(drawn) <= count + 6  # of each call, those that it drew in advance, and the first to know its shape
