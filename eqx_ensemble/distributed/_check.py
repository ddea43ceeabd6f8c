"""Checks of arrays over several processes, and error messages."""

from collections.abc import Sequence
from typing import Any

import jax

from .._check import is_traced, path_text


def check_addressable(leaf: Any, path: tuple) -> None:
    """Checks that a leaf is not traced and that every process holds a part of it."""
    if is_traced(leaf):
        raise TypeError(
            f"`distributed.to_host` copies arrays to the host, and the leaf at `{path_text(path)}` is traced: call it "
            "outside `jax.jit` and other transformations."
        )
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return
    holders = {device.process_index for device in leaf.sharding.device_set}
    without = sorted(set(range(jax.process_count())) - holders)
    if without:
        raise ValueError(
            f"`distributed.to_host` needs arrays of which every process holds a part, and process {without[0]} of "
            f"{jax.process_count()} holds none of the leaf at `{path_text(path)}`.\n"
            "Shard it over devices of all processes first."
        )


def broadcast_type_message(kind: str) -> str:
    """The message for a value of process 0 that is not a number."""
    return (
        "`distributed.broadcast_from_first` needs a bool, an int of at most 64 bits or a float in process 0, got "
        f"{kind}.\n"
        "Encode it as a number."
    )


def failure_message(processes: Sequence[int]) -> str:
    """The message in processes without a failure, when others failed."""
    listed = ", ".join(map(str, processes))
    return f"The checkpoint was not written, because it failed in another process ({listed}); check its log"
