import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised array, aligned so that `jax.device_put` need not copy it to a CPU device."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)
