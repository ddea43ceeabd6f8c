"""The tables of the documentation, from the lists that the tests use."""

from . import equinox_layers, flows
from .libraries import LIBRARIES, UNFIT


def works() -> str:
    """What can be a member, in Markdown."""
    rows = {"equinox.nn": equinox_layers.CASES, **LIBRARIES}
    names = lambda cases: ", ".join(f"`{name}`" for name in sorted(cases))
    whole = {  # the tests see that none is missing
        "equinox.nn": "all",
        "distreqx": "all distributions and bijectors",
        "flowjax": f"all distributions and bijections, {names(flows.FLOWS)}",
    }
    lines = [f"| {library} | {whole.get(library) or names(cases)} |" for library, cases in rows.items()]
    return "\n".join(["| library | modules |", "|---|---|", *lines])


def refused() -> str:
    """What cannot be a member, with the reason."""
    lines = [f"| {name} | {case.reason} |" for name, case in UNFIT.items()]
    return "\n".join(["| refused | reason |", "|---|---|", *lines])
