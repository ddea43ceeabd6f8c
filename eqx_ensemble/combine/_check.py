from typing import Any

import numpy as np


def check_sketch_levels(levels: Any, *, name: str) -> tuple[float, ...]:
    """Several numbers from 0 to 1."""
    found = np.asarray(levels)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "fiu":
        raise TypeError(f"`{name}` needs a list of `levels`, got {levels!r}.")
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"`{name}` needs `levels` from 0 to 1, got {levels!r}.")
    return tuple(float(level) for level in found)
