import math
import os
from typing import NamedTuple

import jax

from ._check import (
    check_coordinator,
    check_duration,
    check_no_arguments,
    check_process_numbers,
    check_same_arguments,
    detection_message,
)
from ._environment import CLUSTERS, Settings, find_settings
from ._exit import exit_after_error, wait_after_error
from ._rendezvous import Rendezvous, bind_address, is_loopback, join_address, wait_for_all


class Processes(NamedTuple):
    """The processes that run one program, and the number of this one.

    **Attributes:**

    - `process_id`: the number of this process, from 0.
    - `num_processes`: the number of processes.
    """

    process_id: int
    num_processes: int


_started: list[tuple[Settings, Processes]] = []  # at most one


def initialise(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int | float = 300,
    heartbeat: int | float = 100,
) -> Processes:
    """Connects this process to others that run the same program, and to their devices.

    Call it first, in every process: `jax.devices()` then lists the devices of all of them, and a mesh over these
    spans the processes. Arguments that are not given are read from the environment:

    1. `python -m eqx_ensemble.launch`, on one machine;
    2. the environment variables `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK`, if all are set, and
        `LOCAL_RANK` for the one device that the process uses, as torchrun and similar launchers set them;
    3. launchers that JAX detects: Slurm, Open MPI, Kubernetes (with the package `kubernetes`) and TPU pods.

    Without any of these the program runs in a single process and nothing happens, so the same script runs on a laptop.
    Further calls must have the same arguments, or none.

    In the first two cases the processes connect at the address of the coordinator before JAX does: if one is missing,
    all others raise an error that names it. (JAX alone aborts all processes with a signal, and names none: seen with
    0.9.0, 0.10.1 and 0.12.0.) Launchers of the third kind report tasks that did not start themselves. At an address on
    this machine (`127.0.0.1`, `localhost`, `[::1]`) process 0 listens on this machine only; at any other, on all its
    interfaces, unless `JAX_COORDINATOR_BIND_ADDRESS` is set. The connection is neither encrypted nor authenticated: use
    a trusted network.

    A process exits at once after an uncaught exception. (With JAX alone, it would wait five minutes for the others.)

    **Arguments:**

    - `coordinator`: the host of process 0, and a free port on it: `"host:port"`.
    - `num_processes`: the number of processes. With 1 nothing happens.
    - `process_id`: the number of this process, from 0.
    - `timeout`: the number of seconds to wait for the others.
    - `heartbeat`: the number of seconds without a heartbeat after which a process counts as dead; JAX then ends the
        others. Those that compute together with it raise an error earlier.

    **Returns:** a named tuple: `process_id` and `num_processes`.

    **Raises:** `TimeoutError` that names the missing processes; `RuntimeError` if JAX has been used before, if this
    process was initialised with other arguments, or if JAX detects a cluster but cannot connect its processes;
    `OSError` if process 0 cannot listen at the address; `TypeError` and `ValueError` for invalid arguments and
    environment variables.

    ```python
    processes = ee.distributed.initialise()
    print(f"process {processes.process_id} of {processes.num_processes}")
    ```
    """
    if coordinator is not None:
        check_coordinator(coordinator)
    given = Settings(coordinator, *check_process_numbers(num_processes, process_id))
    timeout, heartbeat = check_duration(timeout, "timeout"), check_duration(heartbeat, "heartbeat")
    if _started:
        settings, processes = _started[0]
        check_same_arguments(given.numbers, settings.numbers)
        return processes
    if jax.distributed.is_initialized():
        check_no_arguments(given.numbers)
        return Processes(jax.process_index(), jax.process_count())
    settings = find_settings(given)
    if settings.num_processes == 1:
        return Processes(0, 1)
    processes = (_join if settings.complete else _leave_to_jax)(settings, math.ceil(timeout), math.ceil(heartbeat))
    if processes.num_processes > 1:
        _started.append((Settings(settings.coordinator, processes.num_processes, processes.process_id), processes))
        exit_after_error()
    return processes


def _join(settings: Settings, timeout: int, heartbeat: int) -> Processes:
    """Joins processes whose settings are known, after all of them have connected."""
    host, port = check_coordinator(settings.coordinator)
    processes = Processes(settings.process_id or 0, settings.num_processes or 1)
    wait_for_all(Rendezvous(host, port, processes.num_processes, processes.process_id, timeout))
    jax.distributed.initialize(
        join_address(host, port),
        processes.num_processes,
        processes.process_id,
        settings.local_devices,
        "deactivate",
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
        coordinator_bind_address=bind_address(host, port) if is_loopback(host) else None,
    )
    return processes


def _leave_to_jax(settings: Settings, timeout: int, heartbeat: int) -> Processes:
    """Joins the processes that JAX detects; without any, this is a single process."""
    try:
        jax.distributed.initialize(
            settings.coordinator,
            settings.num_processes,
            settings.process_id,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat,
        )
    except Exception as error:  # no cluster, without a type for it; JAX used before; or settings not understood
        if any(name in os.environ for name in CLUSTERS):
            raise RuntimeError(detection_message(error)) from error
        settings.check_complete()
        return Processes(0, 1)
    return Processes(jax.process_index(), jax.process_count())


def shutdown() -> None:
    """Disconnects from the other processes, after all of them have called it.

    It is not needed at the end of a program. With a single process nothing happens.

    ```python
    ee.distributed.shutdown()
    ```
    """
    wait_after_error()
    _started.clear()
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this is process 0, which prints, shows progress and writes small files.

    Call it after [`eqx_ensemble.distributed.initialise`][]. All processes must run the same computations; only the use
    of their results may depend on this.

    **Returns:** `True` in process 0, and in a single process.

    ```python
    loss = ee.distributed.to_host(jnp.ones(4))
    if ee.distributed.is_first():
        print(loss.mean())
    ```
    """
    if _started:
        return _started[0][1].process_id == 0
    return jax.process_index() == 0
