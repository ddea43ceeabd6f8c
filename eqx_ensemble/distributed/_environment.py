import os
from collections.abc import Mapping
from typing import NamedTuple

from jax._src.clusters import ClusterEnv  # JAX has no public way to ask where it is

from ._check import check_complete, check_coordinator, check_integer_variables, check_process_numbers, detection_message

OURS = ("EQX_ENSEMBLE_COORDINATOR", "EQX_ENSEMBLE_NUM_PROCESSES", "EQX_ENSEMBLE_PROCESS_ID")
"""What `eqx_ensemble.launch` tells the processes that it starts."""

TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class Place(NamedTuple):
    """What is known of the processes, and of this one. `local_devices` is `None` where JAX may choose."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None
    known_to_jax: bool = True

    @property
    def numbers(self) -> dict[str, str | int | None]:
        """What is the same for all processes, and the number of this one, by the names of the arguments."""
        return {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }


def located(given: Place, *, timeout: float) -> Place:
    """What the arguments leave out, from whoever started this process. All `None` where nobody says anything."""
    if given.num_processes == 1:
        return given._replace(process_id=0)
    said = from_environment(os.environ)
    place = said._replace(**{name: value for name, value in given.numbers.items() if value is not None})
    if place.coordinator is None:
        place = place._replace(coordinator=os.environ.get("JAX_COORDINATOR_ADDRESS"))
    if None in place.numbers.values() and place.known_to_jax:
        place = place._replace(**_detected(place, timeout))
    if any(value is not None for value in place.numbers.values()) or _several(os.environ):
        check_complete(place.numbers, os.environ, TORCH)
        check_coordinator(place.coordinator)
        check_process_numbers(place.num_processes, place.process_id)
    return place


def from_environment(variables: Mapping[str, str]) -> Place:
    """What the launcher says, or one of those that start processes for PyTorch."""
    if all(name in variables for name in OURS):
        count, number = check_integer_variables(variables, OURS[1:])
        return Place(variables[OURS[0]], count, number, known_to_jax=False)
    if all(name in variables for name in TORCH):
        port, count, number = check_integer_variables(variables, TORCH[1:])
        # The agents of torchrun talk to each other at the port itself.
        port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = variables["MASTER_ADDR"]
        devices = check_integer_variables(variables, ["LOCAL_RANK"]) if "LOCAL_RANK" in variables else None
        return Place(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}", count, number, devices, known_to_jax=False
        )
    return Place()


def _several(variables: Mapping[str, str]) -> bool:
    """Whether someone meant this process to be one of several, and has not said all."""
    return variables.get("WORLD_SIZE", "1") != "1" or variables.get("RANK", "0") != "0"


def _detected(place: Place, timeout: float) -> dict[str, str | int | None]:
    """What JAX finds in Slurm, Open MPI, Kubernetes and pods of TPUs."""
    try:
        # Which devices a process of several takes is left to JAX, which also heeds `JAX_LOCAL_DEVICE_IDS`.
        *found, _ = ClusterEnv.auto_detect_unset_distributed_params(
            place.coordinator, place.num_processes, place.process_id, [], None, int(timeout)
        )
    except Exception as error:
        raise RuntimeError(detection_message(error)) from error
    return dict(zip(place.numbers, found, strict=True))
