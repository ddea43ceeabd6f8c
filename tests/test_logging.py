"""The programs of `docs/recipes/logging.md` write what the run reports, read back by each tool's own reader."""

import csv
import importlib.util
import pathlib
import re

import numpy as np
import pytest

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "recipes" / "logging.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def program(word):
    """What the first block, and the one that contains `word`, leave."""
    namespace = {"__name__": "page"}
    (block,) = (block for block in BLOCKS[1:] if word in block)
    for part in (BLOCKS[0], block):
        exec(compile(part, str(PAGE), "exec"), namespace)
    return namespace


def needs(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, of no extra of this package")


def finals(run):
    """The mean loss of each member's last epoch."""
    return dict(enumerate(run.train_state.loss.tolist()))


def records_of_leveldb(data, *, header):
    """The records of a log of LevelDB, in blocks of 32 KiB, of which the first has a header before it."""
    at, parts = 0, []
    while at + 7 <= len(data):
        left = 2**15 - (at + header) % 2**15
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.mark.slow
def test_csv():
    made = program("import csv")
    with open(made["path"], newline="") as file:
        rows = list(csv.DictReader(file))
    history = made["run"].history
    column = lambda name, rows: np.array([float(row[name]) for row in rows], np.float32)
    np.testing.assert_array_equal(column("step", rows), history.validation_step)
    for i in range(4):
        np.testing.assert_allclose(column(f"loss_{i}", rows), history.loss[i].reshape(20, -1).mean(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(column(f"score_{i}", rows), history.validation[i])


@pytest.mark.slow
@needs("tensorboardX", "tensorboard")
def test_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = program("tensorboardX")
    events = EventAccumulator(made["folder"]).Reload()
    last = {i: events.Scalars(f"loss/{i}")[-1] for i in range(4)}
    assert {event.step for event in last.values()} == {140}
    assert {i: np.float32(event.value) for i, event in last.items()} == finals(made["run"])
    assert events.Histograms("scores")


@pytest.mark.slow
@needs("wandb")
def test_weights_and_biases(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    from wandb.proto.wandb_internal_pb2 import Record

    made = program("import wandb")
    (log,) = pathlib.Path(made["folder"]).glob("wandb/offline-run-*/*.wandb")
    last = {}
    for data in records_of_leveldb(log.read_bytes()[7:], header=7):
        record = Record()
        record.ParseFromString(data)
        last |= {"/".join([item.key, *item.nested_key]).strip("/"): item.value_json for item in record.history.item}
    assert {i: np.float32(last[f"loss/{i}"]) for i in range(4)} == finals(made["run"])
    assert int(last["_step"]) == 140


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of its own dependencies
@needs("mlflow")
def test_mlflow():
    made = program("import mlflow")
    client = made["mlflow"].MlflowClient()
    for i, loss in finals(made["run"]).items():
        history = client.get_metric_history(made["log_run"].info.run_id, f"loss/{i}")
        assert history[-1].value == loss
        assert history[-1].step == 140
