"""Transfers between host and devices that a call is made for count as explicit under `jax.transfer_guard`."""

import contextlib
import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_F = TypeVar("_F", bound=Callable[..., Any])
_GUARDS = {
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def call_transferring(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a function whose transfers are explicit: only the levels of guards that name explicit ones stop them."""
    __tracebackhide__ = True  # in IPython and pytest
    guarded = [guard for name, guard in _GUARDS.items() if getattr(jax.config, name) in ("log", "disallow")]
    if not guarded:
        return fn(*args, **kwargs)
    with contextlib.ExitStack() as stack:
        for guard in guarded:
            stack.enter_context(guard("allow"))
        return fn(*args, **kwargs)


def transfers(fn: _F) -> _F:
    """A decorator: the function is called by `call_transferring`."""

    @ft.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_transferring(fn, args, kwargs)

    return call  # pyright: ignore[reportReturnType]
