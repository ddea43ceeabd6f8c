"""The files of `docs/processes.md` work, as far as one machine can show it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from ..children import Child, free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "processes.md").read_text()
RECIPE = (ROOT / "docs" / "recipes" / "processes.md").read_text()
TWO = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}

pytestmark = pytest.mark.slow


def block(language, containing, page=PAGE):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if containing in text]
    return found


def program(call):
    """The program of the page, connected by another call."""
    text = block("python", "LOCAL_RANK")
    return text[: text.index("# torchrun")] + call + text[text.index("\nmesh =") :]


PRINTED = block("text", "processes").strip()


def check_printed(text, path, program, variables):
    """Only the first of two processes prints the text, for each of which a launcher sets these variables."""
    path.write_text(program)
    children = [Child([sys.executable, str(path)], os.environ | TWO | variables(i)) for i in ("0", "1")]
    try:
        ends = [child.finish(120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [text in out for _, out, _ in ends] == [True, False], ends


def srun(i):
    task = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return task | {"SLURM_PROCID": i, "SLURM_LOCALID": i}


def test_torchrun(tmp_path):
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": "2"}
    variables = lambda i: both | {"RANK": i, "LOCAL_RANK": i}
    check_printed(PRINTED, tmp_path / "check_torchrun.py", block("python", "LOCAL_RANK"), variables)


def test_slurm(tmp_path):
    check_printed(PRINTED, tmp_path / "check_srun.py", program(block("python", "initialize()")), srun)
    batch = block("bash", "#SBATCH")
    assert subprocess.run(["bash", "-n"], input=batch, text=True).returncode == 0
    assert "\nsrun --kill-on-bad-exit=1 --label python check_srun.py\n" in batch


def test_recipe(tmp_path):
    check_printed("member", tmp_path / "script.py", block("python", "initialize()", RECIPE), srun)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs an MPI")
def test_mpi(tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "check_mpirun.py").write_text(program(block("python", "mpi4py")))
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", block("bash", "mpirun")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert PRINTED in done.stdout
