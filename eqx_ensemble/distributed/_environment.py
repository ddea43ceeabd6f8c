import os
from collections.abc import Mapping
from typing import NamedTuple

from ._check import check_complete, check_coordinator, check_integer_variables, check_process_numbers

OURS = ("EQX_ENSEMBLE_COORDINATOR", "EQX_ENSEMBLE_NUM_PROCESSES", "EQX_ENSEMBLE_PROCESS_ID")
"""The variables that `eqx_ensemble.launch` sets."""

TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")

CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")
"""Variables of launchers that JAX detects: if one is set, failing to connect is an error."""


class Settings(NamedTuple):
    """The number of processes, and the settings of this one. `local_devices` is `None` if JAX chooses."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_devices: list[int] | None = None

    @property
    def numbers(self) -> dict[str, str | int | None]:
        """The settings by the names of the arguments."""
        return {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }

    @property
    def complete(self) -> bool:
        """Whether JAX needs to detect nothing."""
        return None not in self.numbers.values()

    def check_complete(self) -> None:
        """Raises if only some of the settings of several processes are known."""
        if any(value is not None for value in self.numbers.values()) or _several(os.environ):
            check_complete(self.numbers, os.environ, TORCH)


def find_settings(given: Settings) -> Settings:
    """The arguments, completed from the environment. Settings that are `None` are left to JAX."""
    if given.num_processes == 1:
        return given._replace(process_id=0)
    settings = from_environment(os.environ)
    settings = settings._replace(**{name: value for name, value in given.numbers.items() if value is not None})
    if settings.coordinator is None:
        settings = settings._replace(coordinator=os.environ.get("JAX_COORDINATOR_ADDRESS"))
    if settings.coordinator is not None:
        check_coordinator(settings.coordinator)
    check_process_numbers(settings.num_processes, settings.process_id)
    return settings


def from_environment(variables: Mapping[str, str]) -> Settings:
    """The settings in the variables of the launcher, or of the launchers of PyTorch."""
    if all(name in variables for name in OURS):
        count, number = check_integer_variables(variables, OURS[1:])
        return Settings(variables[OURS[0]], count, number)
    if all(name in variables for name in TORCH):
        port, count, number = check_integer_variables(variables, TORCH[1:])
        # The agents of torchrun use the port itself.
        port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = variables["MASTER_ADDR"]
        devices = check_integer_variables(variables, ["LOCAL_RANK"]) if "LOCAL_RANK" in variables else None
        return Settings(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", count, number, devices)
    return Settings()


def _several(variables: Mapping[str, str]) -> bool:
    """Whether variables describe several processes, without all settings."""
    return variables.get("WORLD_SIZE", "1") != "1" or variables.get("RANK", "0") != "0"
