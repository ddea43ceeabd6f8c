"""The program of `docs/scale.md` runs in two processes under each launcher, as far as one machine can show it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from ..children import Child, free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scale.md").read_text()
TWO = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}

pytestmark = pytest.mark.slow


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found


def row(launcher):
    """The line that connects a process and the command that starts all, from the table of launchers."""
    (cells,) = re.findall(rf"^\| {launcher}\b[^|]* \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)
    return cells


def program(call):
    """The program of the page, connected below its imports."""
    head, imported, rest = block("python", "is_first").partition("import eqx_ensemble as ee\n")
    assert imported
    return f"{head}{imported}\n{call}\n{rest}"


(PRINTED,) = re.findall(r"`(2 processes, [^`]*)`", PAGE)


def check_printed(path, call, variables):
    """Only the first of two processes prints, for each of which a launcher sets these variables."""
    path.write_text(program(call))
    children = [Child([sys.executable, str(path)], os.environ | TWO | variables(i)) for i in ("0", "1")]
    try:
        ends = [child.finish(120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [PRINTED in out for _, out, _ in ends] == [True, False], ends
    assert "(400, 1)" in ends[0][1]


def srun(i):
    task = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return task | {"SLURM_PROCID": i, "SLURM_LOCALID": i}


@pytest.mark.slow
def test_torchrun(tmp_path):
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": "2"}
    variables = lambda i: both | {"RANK": i, "LOCAL_RANK": i}
    check_printed(tmp_path / "train.py", block("python", "LOCAL_RANK"), variables)


@pytest.mark.slow
def test_slurm(tmp_path):
    call, start = row("Slurm")
    check_printed(tmp_path / "train.py", call, srun)
    batch = block("bash", "#SBATCH")
    assert subprocess.run(["bash", "-n"], input=batch, text=True).returncode == 0
    assert start == "srun python train.py"
    assert "\nsrun --kill-on-bad-exit=1 --label python train.py\n" in batch


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs an MPI")
def test_mpi(tmp_path):
    pytest.importorskip("mpi4py")
    call, start = row("MPI")
    (tmp_path / "train.py").write_text(program(call))
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | TWO | {"PATH": path}
    done = subprocess.run(start.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert PRINTED in done.stdout
