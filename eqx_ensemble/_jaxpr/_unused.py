from typing import Any

from jax.extend.core import Jaxpr, Literal


def unused_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Whether each input of a program affects no output. Inputs of inner programs count as used."""
    sources, effects = output_sources(jaxpr)
    for source in sources:
        effects |= source
    return [not effects >> i & 1 for i in range(len(jaxpr.invars))]


def output_sources(jaxpr: Jaxpr) -> tuple[list[int], int]:
    """The inputs that each output of a program may depend on, and those of its effects, as bits of integers.

    All outputs of an inner program depend on all of its inputs.
    """
    known: dict[Any, int] = {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    of = lambda var: 0 if isinstance(var, Literal) else known.get(var, 0)
    effects = 0
    for eqn in jaxpr.eqns:
        source = 0
        for var in eqn.invars:
            source |= of(var)
        known |= dict.fromkeys(eqn.outvars, source)
        effects |= source if eqn.effects else 0
    return [of(var) for var in jaxpr.outvars], effects
