from typing import Any

from jax.extend.core import Jaxpr, Literal


def unused_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Of each input of a program, whether no output depends on it. What an inner program is given counts as used."""
    needed: set[Any] = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or needed.intersection(eqn.outvars):
            needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return [var not in needed for var in jaxpr.invars]
