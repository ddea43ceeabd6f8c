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
    """Each member's latest finite loss, by id."""
    return {
        int(i): float(loss[np.isfinite(loss)][-1]) for i, loss in zip(run.ensemble.ids, run.history.loss, strict=True)
    }


def test_csv():
    made = program("import csv")
    with open(made["path"], newline="") as file:
        rows = np.array([[float(cell) for cell in row] for row in csv.reader(file)])
    losses = made["run"].history.loss
    np.testing.assert_array_equal(rows[:, 0], np.arange(1, losses.shape[1] + 1))
    np.testing.assert_array_equal(rows[:, 1:].astype(np.float32), losses.T)


@pytest.mark.slow
@needs("tensorboardX", "tensorboard")
def test_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = program("tensorboardX")
    events = EventAccumulator(made["folder"]).Reload()
    last = {i: events.Scalars(f"loss/{i}")[-1] for i in range(4)}
    assert {event.step for event in last.values()} == {int(made["run"].train_state.step)}
    assert {i: np.float32(event.value) for i, event in last.items()} == finals(made["run"])
    assert events.Histograms("scores")


@pytest.mark.slow
@needs("wandb")
def test_weights_and_biases(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = program("import wandb")
    summary = dict(made["log_run"].summary)
    assert {i: np.float32(summary[f"loss/{i}"]) for i in range(4)} == finals(made["run"])
    assert summary["epoch"] == 20
    (log,) = pathlib.Path(made["folder"]).glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 0


@pytest.mark.slow
@needs("mlflow")
def test_mlflow():
    made = program("import mlflow")
    client = made["mlflow"].MlflowClient()
    for i, loss in finals(made["run"]).items():
        history = client.get_metric_history(made["log_run"].info.run_id, f"loss/{i}")
        assert history[-1].value == loss
        assert history[-1].step == int(made["run"].train_state.step)
