"""Runs the tests with one fault at a time in a copy of the library: `python tests/mutants/run.py --help`."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from listed import MUTANTS

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "site")


def put_in(mutant, root):
    """Writes a mutant into the tree at `root`; returns what undoes it."""
    file = root / "eqx_ensemble" / mutant.path
    source = file.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.path} has to hold it once: {mutant.old}"
    file.write_text(source.replace(mutant.old, mutant.new))
    return lambda: file.write_text(source)


def pytest(root, cache, *args):
    """The first test that fails, or an empty string."""
    own = {"PYTHONPATH": str(root), "JAX_COMPILATION_CACHE_DIR": cache, "TF_CPP_MIN_LOG_LEVEL": "3"}
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=root, env=os.environ | own, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0:
        return ""
    assert done.returncode not in (4, 5), done.stdout + done.stderr  # there is no such test
    return (failed or [f"exit status {done.returncode}"])[0].split(" - ")[0]


def judge(mutant, root, cache, *, whole):
    """What finds a mutant: its own tests first, then with `whole` the default suite, then the slow marks."""
    own = [f"tests/{path}" for path in mutant.tests.split()] + ["-m", ""] * ("::" in mutant.tests)  # also a slow one
    rounds = [own] + [["-n", "auto"], ["-n", "auto", "--dist", "loadgroup", "-m", "slow"]] * whole
    restore = put_in(mutant, root)
    try:
        return next(filter(None, (pytest(root, cache, *args) for args in rounds)), "NOT FOUND")
    finally:
        restore()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="of the mutants; all without")
    parser.add_argument("--whole", action="store_true", help="the whole suite where a mutant's own tests find nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        for number in options.numbers or range(len(MUTANTS)):
            begun, mutant = time.monotonic(), MUTANTS[number]
            found = judge(mutant, root, f"{folder}/cache", whole=options.whole)
            seconds = time.monotonic() - begun
            print(f"{number:3} {seconds:5.0f} s  {mutant.path:36} {mutant.old[:40]!r:44} {found}", flush=True)


if __name__ == "__main__":
    main()
