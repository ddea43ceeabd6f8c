"""The files of `docs/processes.md` work, as far as one machine can show it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from eqx_ensemble import launch
from eqx_ensemble.distributed._environment import TORCH

from .test_initialise import SOMEONE_SAYS, free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "processes.md").read_text()
SAID = "2 processes, 4 devices, weights (4, 1, 2)"

pytestmark = pytest.mark.slow


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in SOMEONE_SAYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check.py").write_text(block("python", "initialise()"))
    return tmp_path


def test_a_laptop(folder, capfd):
    *_, module, n, two, devices, each, script = block("bash", "launch -n 2").split()
    assert module == "eqx_ensemble.launch"
    assert launch.main([n, two, devices, each, script]) == 0
    out, _ = capfd.readouterr()
    assert f"[0] {SAID}\n" == block("text", "[0]")
    assert f"[0] {SAID}" in out.splitlines()


def test_anything_else(folder):
    text = block("bash", "MASTER_PORT")
    (folder / "check.sh").write_text(text.replace("29500", str(free_port())))
    done = subprocess.run(["bash", "check.sh"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert SAID in done.stdout.splitlines()


def test_slurm(folder):
    """The variables that `srun` sets for two tasks of one node."""
    task = "export SLURM_JOB_ID={job} SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID={i} SLURM_LOCALID={i}\n"
    task += "export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2; python check.py"
    job = os.getpid()
    tasks = [subprocess.Popen(["bash", "-c", task.format(job=job, i=i)], stdout=subprocess.PIPE) for i in range(2)]
    outputs = [one.communicate(timeout=120)[0].decode() for one in tasks]
    assert [one.returncode for one in tasks] == [0, 0]
    assert SAID in outputs[0].splitlines()
    batch = block("bash", "#SBATCH")
    assert subprocess.run(["bash", "-n"], input=batch, text=True).returncode == 0
    assert "\nsrun --kill-on-bad-exit=1 --label python check.py\n" in batch


def test_kubernetes():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(block("yaml", "kind: Job"))
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert set(variables) == set(TORCH)
    name = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pods["subdomain"] == name
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{name}"
    assert int(variables["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert container["volumeMounts"][0]["name"] == pods["volumes"][0]["name"]
