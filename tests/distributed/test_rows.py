"""Each of two processes reads the rows of its own devices, and the run is that of arrays in memory."""

import pathlib

import pytest

from ..children import finish_together


@pytest.mark.slow
def test_processes_read_their_own_rows():
    finish_together(pathlib.Path(__file__).parent / "rows_together.py", PYTHONWARNINGS="ignore")
