import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._leaves import is_member_array

_LONGEST = 60


def leaf_text(value: Any) -> str:
    """A short text for a leaf or a static value: `f32[4,2]` for an array, otherwise a trimmed representation."""
    if is_member_array(value) or isinstance(value, jax.ShapeDtypeStruct):
        struct = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return eqx.tree_pformat(struct, struct_as_array=True)
    if isinstance(value, types.CodeType):
        return f"<{value.co_qualname}, {Path(value.co_filename).name}:{value.co_firstlineno}>"
    if isinstance(value, np.ndarray):  # of strings or objects, for which Equinox shows only the type
        return f"{value!r}"[:_LONGEST]
    text = " ".join(eqx.tree_pformat(value, width=10**6).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
