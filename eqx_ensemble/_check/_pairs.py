import numpy as np
from jax import Array

from ._leaves import kind_text

_ARRAYS = (np.ndarray, Array)


def check_no_pair(name: str, argument: str, values: object) -> None:
    """Raises for tuples of arrays, such as means and variances, which would become members."""
    fields: tuple[str, ...] = getattr(values, "_fields", ())
    if not isinstance(values, tuple) or not (fields or any(np.ndim(x) for x in values if isinstance(x, _ARRAYS))):
        return
    held = f": {', '.join(fields)}" if fields else " arrays"
    one = f"{argument}.{fields[0]}" if fields else f"{argument}[0]"
    raise TypeError(
        f"`{name}` needs `{argument}` as one array.\n  got {kind_text(values)} of {len(values)}{held}\n"
        f"Take the one that is meant, such as `{one}`. One array for each member? `jnp.stack({argument})`."
    )
