import argparse
import os
import socket
import sys
from collections.abc import Sequence

from ..distributed._environment import OURS
from ._check import check_launch, check_process_groups
from ._run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments. Returns its exit code."""
    options = _parse_arguments(arguments)
    program = ["-m", options.program] if options.module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    if options.processes == 1:
        os.execve(sys.executable, command, environment_of(0, processes=1, devices=options.devices, port=0))
    check_process_groups()
    port = _free_port()
    environments = [
        environment_of(number, processes=options.processes, devices=options.devices, port=port)
        for number in range(options.processes)
    ]
    return run(command, environments, grace=options.grace)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_ensemble.launch",
        usage="%(prog)s -n PROCESSES [--devices DEVICES] [--grace SECONDS] [-m] PROGRAM [ARGUMENTS ...]",
        description="Run a program in several processes on this machine that find each other, and show what they "
        "write with their number in front. For programs that call `distributed.initialise`.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="number of processes")
    parser.add_argument("--devices", type=int, help="virtual CPU devices per process (default: what JAX finds)")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL (default: 5)")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as in `python -m`")
    parser.add_argument("program", metavar="PROGRAM", help="the script")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(arguments)
    try:
        check_launch(options.processes, options.devices, options.grace, None if options.module else options.program)
    except ValueError as error:
        parser.error(str(error))
    return options


def environment_of(number: int, *, processes: int, devices: int | None, port: int) -> dict[str, str]:
    """The environment of one process."""
    variables = {name: value for name, value in os.environ.items() if name not in OURS}
    if processes > 1:
        variables |= dict(zip(OURS, (f"127.0.0.1:{port}", str(processes), str(number)), strict=True))
        variables["PYTHONUNBUFFERED"] = "1"  # shows lines immediately
    if devices is not None:
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        variables.setdefault("JAX_PLATFORMS", "cpu")
    elif processes > 1:
        variables.setdefault("JAX_LOCAL_DEVICE_IDS", str(number))  # one GPU each
    return variables


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
