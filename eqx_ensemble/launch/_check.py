import math
import os
import signal


def check_launch(processes: int, devices: int | None, grace: float, script: str | None) -> None:
    """Checks the options of the command line."""
    if processes < 1:
        raise ValueError(f"-n needs at least 1 process, got {processes}")
    if devices is not None and devices < 1:
        raise ValueError(f"--devices needs at least 1, got {devices}")
    if not (math.isfinite(grace) and grace >= 0):
        raise ValueError(f"--grace needs a number of seconds, got {grace:g}")
    if script is not None and not os.path.isfile(script):
        raise ValueError(f"there is no file {script!r}; a module is run by `-m`")


def check_process_groups() -> None:
    """Checks that the system can end a process together with its children."""
    if not hasattr(os, "killpg"):
        raise NotImplementedError(
            "`python -m eqx_ensemble.launch` ends processes in groups, which this system does not have.\n"
            "Start the processes yourself, and pass `coordinator`, `num_processes` and `process_id` to "
            "`distributed.initialise`."
        )


def exit_message(process_id: int, code: int, *, others: int) -> str:
    """The message for a process that failed."""
    how = f"failed with exit code {code}"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {known.get(-code, f'signal {-code}')}"
    rest = f"; ending the {'other process' if others == 1 else f'{others} other processes'}" if others else ""
    return f"eqx_ensemble.launch: process {process_id} {how}{rest}."
