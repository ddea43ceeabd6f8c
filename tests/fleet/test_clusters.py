"""The files of the recipe of clusters work, as far as one machine can show it: with stand-ins for Slurm's commands."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import eqx_ensemble as ee

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes" / "clusters.md").read_text()
SCONTROL = '#!/bin/bash\necho "$@" >> requeued\n'
SRUN = '#!/bin/bash\nshift\n"$@" & "$@" & wait\n'  # two tasks


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found


TRAIN = block("python", "def train(task)")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One with the page's programs, an environment of Python, and commands that stand for Slurm's."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "array.sbatch").write_text(block("bash", "#SBATCH --array"))
    (tmp_path / "fleet.sbatch").write_text(block("bash", "#SBATCH --ntasks").replace('"$PWD"', f'"$PWD:{ROOT}"'))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "combine.py").write_text(block("python", "ee.concatenate"))
    (tmp_path / "fleet.py").write_text(block("python", "scheduler_file"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(script, **env):
    return subprocess.Popen(["bash", script], env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def one_fit(monkeypatch):
    """The members of the page, trained by one process."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    names = {"__name__": "train"}
    exec(TRAIN.replace("TASKS = 32, 4", "TASKS = 32, 1").replace('"runs"', '"alone"'), names)
    names["train"](0)
    return ee.load("alone/members-0", names["make"]), names


def assert_members(monkeypatch):
    expected, names = one_fit(monkeypatch)
    found = ee.load("runs/members", names["make"])
    assert np.asarray(found.ids).tolist() == list(range(32))
    for one, other in zip(found.stacked.layers, expected.stacked.layers, strict=True):
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-4, atol=1e-5)  # shards round otherwise


@pytest.mark.slow
def test_an_array(folder, monkeypatch):
    (folder / "train.py").write_text(TRAIN.replace("TASKS = 32, 4", "TASKS = 32, 2"))  # which starts fewer processes
    for task in range(2):
        done = start("array.sbatch", SLURM_ARRAY_TASK_ID=str(task))
        out, _ = done.communicate(timeout=120)
        assert done.returncode == 0, out.decode()
    done = subprocess.run([sys.executable, "combine.py"], capture_output=True, text=True, timeout=120)
    assert re.match(r"32 members, mean squared error 0\.\d+\n", done.stdout), done.stderr
    assert_members(monkeypatch)
    assert not (folder / "requeued").exists()


@pytest.mark.slow
def test_a_task_that_loses_its_machine(folder):
    """It is put into the queue again, and goes on."""
    often = TRAIN.replace('RUNS / f"run-{task}"', 'ee.checkpoint.Checkpoints(RUNS / f"run-{task}", every=500)')
    (folder / "train.py").write_text(often.replace("epochs=5,", "epochs=3000,"))
    task = start("array.sbatch", SLURM_ARRAY_TASK_ID="3")
    deadline = time.monotonic() + 90
    while not list(folder.glob("runs/run-3/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    task.send_signal(signal.SIGTERM)
    out, _ = task.communicate(timeout=60)
    assert task.returncode == 75, out.decode()
    assert (folder / "requeued").read_text() == "requeue 7_3\n"
    assert not (folder / "runs" / "members-3").exists()
    again = start("array.sbatch", SLURM_ARRAY_TASK_ID="3")
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out.decode()
    assert (folder / "runs" / "members-3").exists()


@pytest.mark.slow
def test_dask(folder, monkeypatch):
    pytest.importorskip("distributed", reason="needs the extra `dask`")
    done = start("fleet.sbatch")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0, out.decode()
    assert "Run of 32 members, 65 steps" in out.decode()
    assert_members(monkeypatch)


@pytest.mark.parametrize("text", re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
def test_scripts_can_be_parsed(text):
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_the_manifest():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("yaml", "kind: Job"))["spec"]
    pods = job["template"]["spec"]
    (container,) = pods["containers"]
    assert f"TASKS = 32, {job['completions']}\n" in TRAIN
    assert "#SBATCH --array=0-3\n" in block("bash", "--array=0-3")
    assert job["completionMode"] == "Indexed"
    assert pods["restartPolicy"] == "Never"  # which a policy of failures needs
    code, disruption = job["podFailurePolicy"]["rules"]
    assert code["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [75]}
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pods["volumes"]}
    assert container["command"][-1].startswith("exec python -u /program/train.py")
