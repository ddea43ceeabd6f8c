from collections.abc import Mapping
from typing import Any

import numpy as np

from .._check import first_text, needs_message
from ._check import check_plotted


def check_rates(name: str, rates: Mapping[str, Any], *, rising: tuple[str, ...]) -> list[np.ndarray]:
    """Raises unless rates are from 0 to 1, of one shape, and those in `rising` do not decrease. Returns them."""
    found = {argument: check_plotted(name, argument, values, "(points,)") for argument, values in rates.items()}
    if len({values.shape for values in found.values()}) > 1:
        got = "got " + ", ".join(f"`{argument}` {values.shape}" for argument, values in found.items())
        both = " and ".join(f"`{argument}`" for argument in found)
        raise ValueError(needs_message(name, f"{both} of one shape", got, "They are the coordinates of one curve."))
    for argument, values in found.items():
        wrong = (values < 0) | (values > 1)
        if argument in rising:
            wrong |= np.diff(values, prepend=values[0]) < 0
        if wrong.any():
            kind = "that rises, from 0 to 1" if argument in rising else "from 0 to 1"
            fix = f"Swapped? `{next(iter(found))}` comes first, and its points begin at the highest threshold."
            raise ValueError(needs_message(name, f"`{argument}` {kind}", first_text(values, wrong), fix))
    return list(found.values())
