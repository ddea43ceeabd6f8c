"""Parameters of which most are slow."""

import pytest


def slow_but(quick, values):
    """The values, marked as slow except for those in `quick`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
