import os
from collections.abc import Mapping
from typing import NamedTuple

from jax._src.clusters import ClusterEnv  # JAX has no public function for this

from ._check import check_complete, check_coordinator, check_integer_variables, check_process_numbers, detection_message

OURS = ("EQX_ENSEMBLE_COORDINATOR", "EQX_ENSEMBLE_NUM_PROCESSES", "EQX_ENSEMBLE_PROCESS_ID")
"""The variables that `eqx_ensemble.launch` sets."""

TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class Settings(NamedTuple):
    """The number of processes, and the settings of this one. `local_devices` is `None` where JAX chooses."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None
    known_to_jax: bool = True

    @property
    def numbers(self) -> dict[str, str | int | None]:
        """The settings by the names of the arguments."""
        return {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }


def find_settings(given: Settings, *, timeout: float) -> Settings:
    """The arguments, completed from the environment and by JAX. All `None` for a single process."""
    if given.num_processes == 1:
        return given._replace(process_id=0)
    settings = from_environment(os.environ)
    settings = settings._replace(**{name: value for name, value in given.numbers.items() if value is not None})
    if settings.coordinator is None:
        settings = settings._replace(coordinator=os.environ.get("JAX_COORDINATOR_ADDRESS"))
    if None in settings.numbers.values() and settings.known_to_jax:
        settings = settings._replace(**_detect(settings, timeout))
    if any(value is not None for value in settings.numbers.values()) or _several(os.environ):
        check_complete(settings.numbers, os.environ, TORCH)
        check_coordinator(settings.coordinator)
        check_process_numbers(settings.num_processes, settings.process_id)
    return settings


def from_environment(variables: Mapping[str, str]) -> Settings:
    """The settings in the variables of the launcher, or of the launchers of PyTorch."""
    if all(name in variables for name in OURS):
        count, number = check_integer_variables(variables, OURS[1:])
        return Settings(variables[OURS[0]], count, number, known_to_jax=False)
    if all(name in variables for name in TORCH):
        port, count, number = check_integer_variables(variables, TORCH[1:])
        # The agents of torchrun talk to each other at the port itself.
        port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = variables["MASTER_ADDR"]
        devices = check_integer_variables(variables, ["LOCAL_RANK"]) if "LOCAL_RANK" in variables else None
        return Settings(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}", count, number, devices, known_to_jax=False
        )
    return Settings()


def _several(variables: Mapping[str, str]) -> bool:
    """Whether variables describe several processes, without all settings."""
    return variables.get("WORLD_SIZE", "1") != "1" or variables.get("RANK", "0") != "0"


def _detect(settings: Settings, timeout: float) -> dict[str, str | int | None]:
    """What JAX detects in Slurm, Open MPI, Kubernetes and pods of TPUs."""
    try:
        # Which devices a process of several takes is left to JAX, which also heeds `JAX_LOCAL_DEVICE_IDS`.
        *found, _ = ClusterEnv.auto_detect_unset_distributed_params(
            settings.coordinator, settings.num_processes, settings.process_id, [], None, int(timeout)
        )
    except Exception as error:
        raise RuntimeError(detection_message(error)) from error
    return dict(zip(settings.numbers, found, strict=True))
