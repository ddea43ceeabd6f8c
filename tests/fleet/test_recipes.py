"""The files of the recipe of other engines work, where their packages are installed."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes" / "engines.md").read_text()
FILES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# What each needs, and the words before `train.py`.
ENGINES = {
    "loky": ("loky", []),
    "mpi": ("mpi4py.MPI", ["mpiexec", "-n", "3"]),
    "submitit": ("submitit", []),
    "parsl": ("parsl", []),
    "ray": ("ray", []),
}


def test_every_file_is_run():
    assert len(FILES) == 1 + len(ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engine(name, tmp_path):
    package, before = ENGINES[name]
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # the second: mpi4py without a library of MPI
        pytest.skip(f"needs {package}: {error}")
    (engine,) = [file for file in FILES if re.search(rf"^(?:import|from) {package.partition('.')[0]}\b", file, re.M)]
    (tmp_path / "engine.py").write_text(engine)
    (tmp_path / "train.py").write_text(FILES[0])
    python = [sys.executable, *(["-m", "mpi4py.futures"] if before else [])]
    paths = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # of the programs that packages bring
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": paths}
    command = [*before, *python, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Run of 12 members, 65 steps\n  status   12 ok" in done.stdout


@pytest.mark.slow
def test_ray_tune(tmp_path):
    pytest.importorskip("ray.tune", reason="needs Ray Tune")
    page = (ROOT / "docs" / "recipes" / "ray-tune.md").read_text()
    (file,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "search.py").write_text(file)
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    width, score = re.search(r"\{'width': (\d+), 'depth': \d\} \S+ (\S+)$", done.stdout.strip()).groups()
    assert int(width) in (8, 16, 32)
    assert float(score) < 0.2  # the variance of the targets is 0.43
