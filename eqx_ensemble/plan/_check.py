from typing import Any

from ._plans import AbstractPlan


def check_plan(value: Any) -> None:
    """An execution plan, not its class; its name only for `"auto"`, which the caller has made a plan of."""
    if isinstance(value, AbstractPlan):
        return
    hint = "For example `plan.Vmap()`."
    if isinstance(value, type):
        hint = f"Pass an instance: `{value.__name__}(...)`."
    plans = '`"auto"`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`'
    raise TypeError(f"`plan` must be one of {plans}, got {value!r}.\n{hint}")
