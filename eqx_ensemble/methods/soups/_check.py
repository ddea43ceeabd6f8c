from typing import Any

import numpy as np

from ..._check import kind_text
from ..._foreign import as_numpy

_NAME = "methods.soups.greedy"


def check_value(value: Any) -> float:
    """Raises unless a score is one real number. Returns it."""
    found = as_numpy(value, "score", name=_NAME)
    if found.shape != () or found.dtype.kind not in "iuf" and str(found.dtype) != "bfloat16":
        got = kind_text(value) if found.dtype.kind == "O" else f"{found.dtype} of shape {found.shape}"
        raise TypeError(f"`{_NAME}` needs `score` to return one number, got {got}.\nFor example `jnp.mean(errors)`.")
    return float(found)


def check_some_scores(costs: np.ndarray) -> None:
    """Raises if no member has a score."""
    if np.isnan(costs).all():
        raise ValueError(f"`{_NAME}` needs at least one member whose score is a number; all scores are NaN.")
