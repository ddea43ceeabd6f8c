"""Checks of the settings of several processes, and their error messages."""

import errno
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from .._check import check_integer, is_traced, path_text

_SHOWN = 8


def check_process_numbers(num_processes: Any, process_id: Any) -> tuple[int | None, int | None]:
    """Checks the number of processes and that of this one, if they are given, and returns both."""
    count = _check_integer(num_processes, "num_processes", least=1)
    number = _check_integer(process_id, "process_id", least=0)
    if count is not None and number is not None and number >= count:
        raise ValueError(
            f"`distributed.initialise` needs `process_id` to be below `num_processes`: got process {number} of "
            f"{count}.\nProcesses are counted from 0."
        )
    return count, number


def _check_integer(value: Any, argument: str, *, least: int) -> int | None:
    return None if value is None else check_integer(value, argument, name="distributed.initialise", least=least)


def check_coordinator(value: Any) -> tuple[str, int]:
    """Checks `'host:port'` and returns both."""
    if not isinstance(value, str):
        raise TypeError(
            f"`distributed.initialise` needs `coordinator` as text, got {value!r}.\n"
            "It is where process 0 runs: `'host:port'`, such as `'127.0.0.1:12345'`."
        )
    host, colon, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host != bare
    if not colon or not bare or (":" in bare) != bracketed or not port.isascii() or not port.isdigit():
        raise ValueError(
            f"`distributed.initialise` needs `coordinator` as `'host:port'`, got {value!r}.\n"
            "It is where process 0 runs: `'127.0.0.1:12345'` on one machine, `'node-0:12345'`, `'[fd00::1]:12345'`."
        )
    if not 0 < int(port) < 2**16:
        raise ValueError(f"`distributed.initialise` needs a port from 1 to 65535 in `coordinator`, got {value!r}.")
    return bare, int(port)


def check_duration(value: Any, argument: str) -> float:
    """Checks a positive number of seconds and returns it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`distributed.initialise` needs `{argument}` in seconds, got {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`distributed.initialise` needs a positive number of seconds as `{argument}`, got {value!r}.")
    return float(value)


def check_integer_variables(variables: Mapping[str, str], names: Collection[str]) -> list[int]:
    """Checks that environment variables are whole numbers and returns these."""
    for name in names:
        text = variables[name].strip()
        if not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"`distributed.initialise` needs a whole number in the environment variable `{name}`, got {text!r}."
            )
    return [int(variables[name]) for name in names]


def check_complete(values: Mapping[str, Any], variables: Mapping[str, str], torch_like: Collection[str]) -> None:
    """Checks that no setting is missing: without one, each process would do all of the work alone."""
    missing = [f"`{name}`" for name, value in values.items() if value is None]
    if not missing:
        return
    unset = [f"`{name}`" for name in torch_like if name not in variables]
    hint = "Pass it, or start the processes with `python -m eqx_ensemble.launch`, Slurm or the like."
    if len(unset) < len(torch_like):
        hint += f"\nThe environment variables {_list_text(unset)} are not set; with the others they would define it."
    raise ValueError(f"`distributed.initialise` needs {_list_text(missing)} for several processes.\n{hint}")


def _list_text(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def processes_text(numbers: Collection[int]) -> str:
    """`process 3`, `processes 1 and 2`; at most eight numbers."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"]
    return f"{'process' if len(numbers) == 1 else 'processes'} {_list_text(words)}"


def check_same_arguments(given: Mapping[str, Any], started: Mapping[str, Any]) -> None:
    """Checks that a second call has the arguments of the first."""
    other = [name for name, value in given.items() if value is not None and value != started[name]]
    if other:
        listed = "\n".join(f"  `{name}`: it was {started[name]!r}, and is now {given[name]!r}" for name in other)
        raise RuntimeError(
            f"`distributed.initialise` was called before in this process, with other arguments:\n{listed}\n"
            "Call it once. To begin anew, call `shutdown` in all processes, and start new ones."
        )


def check_no_arguments(given: Mapping[str, Any]) -> None:
    """Checks that no arguments are given if JAX was initialised by its own function."""
    if any(value is not None for value in given.values()):
        raise RuntimeError(
            "`jax.distributed.initialize` was called before in this process, so that `distributed.initialise` cannot.\n"
            "Call one of the two, or `distributed.initialise()` without arguments, which changes nothing."
        )


def detection_message(error: Exception) -> str:
    """The message if JAX did not connect the processes of a cluster."""
    return (
        f"`distributed.initialise` runs in a cluster, whose processes JAX did not connect: "
        f"{type(error).__name__}: {error}\n"
        "Call it before anything that uses a device. Where JAX cannot read the settings, pass `coordinator`, "
        "`num_processes` and `process_id`; for a single process, `num_processes=1`."
    )


def address_message(address: str, error: OSError) -> str:
    """The message if process 0 cannot listen at its address."""
    hint = {
        errno.EADDRINUSE: "Another program listens there: choose another port, for all processes.",
        errno.EADDRNOTAVAIL: "It is the address of another machine: it must be one of that of process 0.",
    }.get(error.errno or 0, "It must be an address of the machine on which process 0 runs.")
    return f"`distributed.initialise` cannot listen at {address} as process 0: {error.strerror}.\n{hint}"


def missing_message(missing: Collection[int], num_processes: int, address: str, seconds: float) -> str:
    """The message if processes did not connect in time."""
    return (
        f"`distributed.initialise` waited {seconds:g} s at {address} for {num_processes} processes, and "
        f"{processes_text(missing)} did not connect.\n"
        "Check their logs, the address that they were given, and firewalls. If they need longer to start, pass a "
        "larger `timeout`."
    )


def no_answer_message(address: str, seconds: float, *, process_id: int, stranger: bool) -> str:
    """The message if process 0 was not found."""
    found = "another program answered" if stranger else "there was no answer"
    return (
        f"`distributed.initialise` in process {process_id} looked for process 0 at {address} for {seconds:g} s, "
        f"and {found}.\n"
        "Check that process 0 runs and was given the same address, and that no firewall is between."
    )


def refusal_message(reason: str, address: str) -> str:
    """The message if process 0 rejects a process."""
    return f"`distributed.initialise` was rejected by process 0 at {address}: {reason}."


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
            f"`distributed.to_host` needs arrays of which every process holds a part, and {processes_text(without)} "
            f"{'holds' if len(without) == 1 else 'hold'} none of the leaf at `{path_text(path)}`.\n"
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
