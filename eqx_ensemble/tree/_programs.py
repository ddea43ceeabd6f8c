from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def is_program(x: Any) -> bool:
    """Whether a static value is a traced program, such as `equinox.filter_closure_convert` stores."""
    return isinstance(x, Jaxpr | ClosedJaxpr)


def program_parts(program: Jaxpr | ClosedJaxpr) -> dict[str, Any]:
    """The parts of a traced program that determine its results.

    Two traces of one function hold distinct variables: here they are numbered in the order in which they appear.
    """
    if isinstance(program, ClosedJaxpr):
        return {"the program": program.jaxpr, "the constants": list(program.consts)}
    numbers: dict[Any, int] = {}

    def name(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return ["a literal", str(variable.aval), variable.val]
        return [numbers.setdefault(variable, len(numbers)), str(variable.aval)]

    parts: dict[str, Any] = {
        "the constants": [name(variable) for variable in program.constvars],
        "the inputs": [name(variable) for variable in program.invars],
    }
    for i, equation in enumerate(program.eqns):
        inputs, outputs = map(name, equation.invars), map(name, equation.outvars)
        parts[f"equation {i}"] = [equation.primitive.name, list(inputs), list(outputs), dict(equation.params)]
    return parts | {"the outputs": [name(variable) for variable in program.outvars]}
