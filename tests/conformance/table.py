"""The tables of the documentation, from the lists that the tests use."""

from . import equinox_layers
from .libraries import LIBRARIES, UNFIT


def works() -> str:
    """What can be a member, in Markdown."""
    rows = {"equinox.nn": equinox_layers.CASES, **LIBRARIES}
    lines = [f"| {library} | {', '.join(f'`{name}`' for name in sorted(cases))} |" for library, cases in rows.items()]
    return "\n".join(["| library | modules |", "|---|---|", *lines])


def refused() -> str:
    """What cannot be a member, with the reason."""
    lines = [f"| {name} | {case.reason} |" for name, case in UNFIT.items()]
    return "\n".join(["| refused | reason |", "|---|---|", *lines])
