"""Finds the neighbours: `_measure` one folder up, and what the tests of checkpoints and of runs share with us."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests" / "train")]
