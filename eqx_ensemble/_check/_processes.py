"""What holds of the processes of one program, and of what they tell each other."""

import errno
import math
import operator
import os
import signal
from collections.abc import Collection, Mapping
from typing import Any

import jax

from ._leaves import is_traced

_SHOWN = 8


def process_numbers(num_processes: Any, process_id: Any) -> tuple[int | None, int | None]:
    """How many processes there are and which one this is, as far as it was said."""
    count = _whole(num_processes, "num_processes", least=1)
    number = _whole(process_id, "process_id", least=0)
    if count is not None and number is not None and number >= count:
        raise ValueError(
            f"`initialise` needs `process_id` to be below `num_processes`: got process {number} of {count}.\n"
            "Processes are counted from 0."
        )
    return count, number


def _whole(value: Any, argument: str, *, least: int) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`initialise` needs an integer `{argument}`, got {value!r}.")
    if number < least:
        raise ValueError(f"`initialise` needs `{argument}` of at least {least}, got {number}.")
    return number


def coordinator_address(value: Any) -> tuple[str, int]:
    """Host and port of the first process."""
    if not isinstance(value, str):
        raise TypeError(
            f"`initialise` needs `coordinator` as text, got {value!r}.\n"
            "It is where process 0 runs: `'host:port'`, such as `'127.0.0.1:12345'`."
        )
    host, colon, port = value.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host != bare
    if not colon or not bare or (":" in bare) != bracketed or not port.isascii() or not port.isdigit():
        raise ValueError(
            f"`initialise` needs `coordinator` as `'host:port'`, got {value!r}.\n"
            "It is where process 0 runs: `'127.0.0.1:12345'` on one machine, `'node-0:12345'`, `'[fd00::1]:12345'`."
        )
    if not 0 < int(port) < 2**16:
        raise ValueError(f"`initialise` needs a port from 1 to 65535 in `coordinator`, got {value!r}.")
    return bare, int(port)


def duration(value: Any, argument: str) -> float:
    """A positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`initialise` needs `{argument}` in seconds, got {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`initialise` needs a positive number of seconds as `{argument}`, got {value!r}.")
    return float(value)


def variables_as_numbers(variables: Mapping[str, str], names: Collection[str]) -> list[int]:
    """What environment variables say, as whole numbers."""
    for name in names:
        text = variables[name].strip()
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"`initialise` needs a whole number in the environment variable `{name}`, got {text!r}.")
    return [int(variables[name]) for name in names]


def nothing_half_said(said: Mapping[str, Any], variables: Mapping[str, str], torch_like: Collection[str]) -> None:
    """Of several processes, all that is needed is known: one that ran alone would do the others' work again."""
    missing = [f"`{name}`" for name, value in said.items() if value is None]
    if not missing:
        return
    unset = [f"`{name}`" for name in torch_like if name not in variables]
    hint = "Pass it, or start the processes with `python -m eqx_ensemble.launch`, Slurm or the like."
    if len(unset) < len(torch_like):
        hint += f"\nThe environment variables {_listed(unset)} are not set, which would say it with the others."
    raise ValueError(f"`initialise` does not know {_listed(missing)} of several processes.\n{hint}")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def numbers_in_words(numbers: Collection[int]) -> str:
    """`process 3`, `processes 1 and 2`; not all of very many."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"]
    return f"{'process' if len(numbers) == 1 else 'processes'} {_listed(words)}"


def jax_not_used(used: bool) -> None:  # noqa: FBT001
    """No array was made and no device asked for."""
    if used:
        raise RuntimeError(
            "`initialise` must come before anything that uses a device, and JAX has been used in this process.\n"
            "Call it first, right after the imports: before arrays, keys, `jax.devices()` and the like."
        )


def same_processes(given: Mapping[str, Any], started: Mapping[str, Any]) -> None:
    """A second call that says nothing else than the first."""
    other = [name for name, value in given.items() if value is not None and value != started[name]]
    if other:
        listed = "\n".join(f"  `{name}`: it was {started[name]!r}, and is now {given[name]!r}" for name in other)
        raise RuntimeError(
            f"`initialise` was called before in this process, with other arguments:\n{listed}\n"
            "Call it once. To begin anew, call `shutdown` in all processes, and start new ones."
        )


def not_started_elsewhere(given: Mapping[str, Any]) -> None:
    """Nothing was asked of processes that others have started, so that it can stay as it is."""
    if any(value is not None for value in given.values()):
        raise RuntimeError(
            "`jax.distributed.initialize` was called before in this process, so that `initialise` cannot.\n"
            "Call one of the two, or `initialise()` without arguments, which leaves things as they are."
        )


def detection_failed(error: Exception) -> RuntimeError:
    """The error for a cluster that JAX knows, but not how it works."""
    return RuntimeError(
        f"JAX found itself in a cluster, but not what `initialise` needs to know: {type(error).__name__}: {error}\n"
        "Pass `coordinator`, `num_processes` and `process_id`; for a process that is alone, `num_processes=1`."
    )


def address_taken(address: str, error: OSError) -> OSError:
    """The error of the first process for an address at which it cannot listen."""
    hint = {
        errno.EADDRINUSE: "Another program listens there: choose another port, for all processes.",
        errno.EADDRNOTAVAIL: "It is the address of another machine: it must be one of that of process 0.",
    }.get(error.errno or 0, "It must be an address of the machine on which process 0 runs.")
    return OSError(error.errno, f"`initialise` cannot listen at {address} as process 0: {error.strerror}.\n{hint}")


def did_not_come(missing: Collection[int], num_processes: int, address: str, seconds: float) -> TimeoutError:
    """The error for processes that some waited for."""
    return TimeoutError(
        f"`initialise` waited {seconds:g} s at {address} for {num_processes} processes, and "
        f"{numbers_in_words(missing)} did not come.\n"
        "See what became of them: their output, the address that they were given, a firewall. If they need longer to "
        "start, pass a larger `timeout`."
    )


def nobody_answered(address: str, seconds: float, *, process_id: int, stranger: bool) -> TimeoutError:
    """The error for a first process that the others did not find."""
    found = "what answered was not it" if stranger else "nobody answered"
    return TimeoutError(
        f"`initialise` in process {process_id} looked for process 0 at {address} for {seconds:g} s, and {found}.\n"
        "See whether process 0 runs and was given the same address, and whether a firewall is between."
    )


def refused(reason: str, address: str) -> ValueError:
    """The error for a process that the first one does not know what to do with."""
    return ValueError(f"`initialise` was turned away by process 0 at {address}: {reason}.")


def launched(processes: int, devices: int | None, grace: float, script: str | None) -> None:
    """Something that can be started several times."""
    if processes < 1:
        raise ValueError(f"-n needs at least 1 process, got {processes}")
    if devices is not None and devices < 1:
        raise ValueError(f"--devices needs at least 1, got {devices}")
    if not (math.isfinite(grace) and grace >= 0):
        raise ValueError(f"--grace needs a number of seconds, got {grace:g}")
    if script is not None and not os.path.isfile(script):
        raise ValueError(f"there is no file {script!r}; a module is run by `-m`")


def has_process_groups() -> None:
    """A system on which a process ends with all that it has started."""
    if not hasattr(os, "killpg"):
        raise NotImplementedError(
            "`eqx_ensemble.launch` ends processes in groups, which this system does not have.\nStart the processes "
            "yourself, and pass `coordinator`, `num_processes` and `process_id` to `initialise`."
        )


def ended(process_id: int, code: int, *, others: int) -> str:
    """The message that a process failed."""
    how = f"failed with exit code {code}"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {known.get(-code, f'signal {-code}')}"
    rest = f"; ending the {'other process' if others == 1 else f'{others} other processes'}" if others else ""
    return f"eqx_ensemble.launch: process {process_id} {how}{rest}."


def has_a_part(leaf: Any, path: str) -> None:
    """An array of numbers, of which every process has a part."""
    if is_traced(leaf):
        raise TypeError(
            f"`to_host` brings numbers to the host, and the leaf at `{path}` is traced: call it outside `jax.jit` and "
            "other transformations."
        )
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return
    holders = {device.process_index for device in leaf.sharding.device_set}
    without = sorted(set(range(jax.process_count())) - holders)
    if without:
        raise ValueError(
            f"`to_host` needs arrays of which every process has a part, and {numbers_in_words(without)} "
            f"{'has' if len(without) == 1 else 'have'} none of the leaf at `{path}`.\n"
            "Spread it over devices of all processes first."
        )


def decision(kind: str) -> TypeError:
    """The error for a decision that is no number."""
    return TypeError(
        "`broadcast_from_first` takes a bool, an int of at most 64 bits or a float of process 0, which passed "
        f"{kind}.\n"
        "Agree on a number that stands for it."
    )
