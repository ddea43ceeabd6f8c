from typing import Any

from jax.extend.core import Jaxpr, Literal


def unused_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Whether each input of a program affects no output. Inputs of inner programs count as used."""
    needed: set[Any] = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or needed.intersection(eqn.outvars):
            needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return [var not in needed for var in jaxpr.invars]
