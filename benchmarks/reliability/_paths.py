"""Paths of the modules used here: `_measure` one folder up, and helpers of the tests of checkpoints and runs."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests" / "train")]
