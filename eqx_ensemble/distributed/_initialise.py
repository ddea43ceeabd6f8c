import math
from typing import NamedTuple

import jax
from jax._src.xla_bridge import backends_are_initialized  # JAX has no public way to ask this without starting one

from ._check import (
    check_coordinator,
    check_duration,
    check_jax_unused,
    check_no_arguments,
    check_process_numbers,
    check_same_arguments,
)
from ._environment import Place, located
from ._exit import leave_at_once_after_an_error, stay_after_an_error
from ._rendezvous import Call, bind_address, everyone_is_here, is_loopback, joined


class Processes(NamedTuple):
    """The processes that run one program together, and which of them this one is.

    **Attributes:**

    - `process_id`: the number of this process, from 0.
    - `num_processes`: how many there are.
    """

    process_id: int
    num_processes: int


_started: list[tuple[Place, Processes]] = []  # at most one


def initialise(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int | float = 300,
    heartbeat: int | float = 100,
) -> Processes:
    """Makes this process one of several that run the same program, with the devices of all.

    To be called first, in every process: `jax.devices()` then lists the devices of all of them, and a mesh over these
    spans the processes. What the arguments leave out comes from whoever started the process:

    1. `python -m eqx_ensemble.launch`, on one machine;
    2. the environment variables `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK`, if all are set, and
        `LOCAL_RANK` for the one device that the process takes, as torchrun and its like set them;
    3. what JAX detects by itself: Slurm, Open MPI, Kubernetes (with the package `kubernetes`) and pods of TPUs.

    Where nobody says anything, the process is alone and nothing happens, so that the same script runs on a laptop. It
    may be called again with the same arguments, or without any.

    Process 0 first calls the roll at the address of the coordinator, because JAX ends a process that waits in vain
    without saying for whom: a process that is missing is an error that names it, in all that came. An address on this
    machine (`127.0.0.1`, `localhost`, `[::1]`) is listened at on this machine only; at any other, process 0 listens
    on all its interfaces, unless `JAX_COORDINATOR_BIND_ADDRESS` says where. The connection is neither encrypted nor
    authenticated: use a network that you trust.

    ```python
    processes = ee.distributed.initialise()
    print(f"process {processes.process_id} of {processes.num_processes}")
    ```

    **Arguments:**

    - `coordinator`: where process 0 runs, and a port that is free there: `"host:port"`.
    - `num_processes`: how many processes there are. With 1 nothing happens.
    - `process_id`: which of them this is, from 0.
    - `timeout`: how many seconds to wait for the others.
    - `heartbeat`: after how many seconds without a sign of life a process counts as dead; the others are then ended
        by JAX. Those that compute together with it notice earlier, by an error of their own.

    **Returns:** a named tuple: `process_id` and `num_processes`.

    **Raises:** `TimeoutError` where a process is missing, which it names; `RuntimeError` where JAX has been used
    before, or where this process was initialised in another way; `OSError` where process 0 cannot listen at
    the address; `TypeError` and `ValueError` for arguments and environment variables that cannot be.

    A process that ends with an exception ends at once. (JAX alone would have it wait five minutes for the others.)
    """
    if coordinator is not None:
        check_coordinator(coordinator)
    given = Place(coordinator, *check_process_numbers(num_processes, process_id))
    timeout, heartbeat = check_duration(timeout, "timeout"), check_duration(heartbeat, "heartbeat")
    if _started:
        place, processes = _started[0]
        check_same_arguments(given.numbers, place.numbers)
        return processes
    if jax.distributed.is_initialized():
        check_no_arguments(given.numbers)
        return Processes(jax.process_index(), jax.process_count())
    place = located(given, timeout=timeout)
    processes = Processes(place.process_id or 0, place.num_processes or 1)
    if processes.num_processes > 1:
        check_jax_unused(used=backends_are_initialized())
        _join(place, processes, timeout, heartbeat)
        _started.append((place, processes))
        leave_at_once_after_an_error()
    return processes


def _join(place: Place, processes: Processes, timeout: float, heartbeat: float) -> None:
    host, port = check_coordinator(place.coordinator)
    everyone_is_here(Call(host, port, processes.num_processes, processes.process_id, timeout))
    jax.distributed.initialize(
        joined(host, port),
        processes.num_processes,
        processes.process_id,
        place.local_devices,
        None if place.known_to_jax else "deactivate",
        initialization_timeout=math.ceil(timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat),
        coordinator_bind_address=bind_address(host, port) if is_loopback(host) else None,
    )


def shutdown() -> None:
    """Leaves the other processes, after all of them have come to do so.

    Not needed at the end of a program, which does the same. Nothing happens in a process that is alone.

    ```python
    ee.distributed.shutdown()
    ```
    """
    stay_after_an_error()
    _started.clear()
    jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this is the process that does what only one must do: print, show progress, write small files.

    To be called after [`eqx_ensemble.distributed.initialise`][]. What all processes compute together must be
    computed by all: only what is done with the result may depend on this.

    ```python
    loss = ee.distributed.to_host(jnp.ones(4))
    if ee.distributed.is_first():
        print(loss.mean())
    ```

    **Returns:** true in process 0, and in a process that is alone.
    """
    if _started:
        return _started[0][1].process_id == 0
    return jax.process_index() == 0
