"""Array functions: annotations say what arguments are; here they are checked, blank and compiled.

The body of an array function gets arrays of one dtype. Rows and members of weight zero are overwritten, so that they
have no influence whatever they hold; `weights` sum to one. With an option `reduction`, the body returns one value per
row.
"""

import functools as ft
import inspect
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, get_origin, overload

import jax
from jaxtyping import Array

from .._caller import caller
from .._check import check_key
from . import kinds
from ._arguments import Arguments
from ._checks import check_arguments, check_option
from ._rows import blank, by_rows, reduce, rows_of_block, sort_arguments

F = TypeVar("F", bound=Callable[..., Any])
Finish = Callable[[Any, dict[str, Any]], Any]


@overload
def array_function(fn: F) -> F: ...
@overload
def array_function(
    *, in_order: str = "", reduces: bool = True, each_row: bool = False, finish: Finish = ...
) -> Callable[[F], F]: ...


def array_function(
    fn: Any = None,
    *,
    in_order: str = "",
    reduces: bool = True,
    each_row: bool = False,
    finish: Finish = lambda out, _: out,
) -> Any:
    """Makes a public function of its body, which is compiled; its options are static, but for levels.

    `in_order` names an argument in whose rising order the body gets the rows, flattened, with ignored ones last; with a
    minus sign, falling. If the argument has members, its values are sorted over them, and weights become
    `(members, *batch)` in their order; the values of members of weight zero are then the largest of the others. With
    `reduces`, an option `reduction` reduces the values of rows that the body returns. Such functions, and those of
    `each_row`, treat rows independently. `finish` gets what the body returned, and the arguments, and returns the
    result: it is not compiled, and may read values to warn of them.

    Methods of Modules may be array functions too. A private one is named in errors by its public caller.
    """
    if fn is None:
        return ft.partial(array_function, in_order=in_order, reduces=reduces, each_row=each_row, finish=finish)
    fn = inspect.unwrap(fn)  # arguments are checked here, whether or not an import hook does it too
    of = Arguments(inspect.signature(fn))
    own_name = fn.__qualname__.removesuffix(".__call__")
    home = itertools.takewhile(lambda part: not part.startswith("_"), fn.__module__.split(".")[1:])
    public_name = "" if own_name.startswith("_") else ".".join([*home, own_name])

    reduces = reduces and "reduction" in of.options
    each_row = each_row or reduces

    @ft.partial(jax.jit, static_argnums=1, static_argnames=of.static)
    def body(counted: Array | None, block: int, /, **given: Any) -> Any:
        given = given if in_order else blank(given, of, counted)
        out: Any = by_rows(fn, given, of, block) if block else fn(**given)
        return reduce(out, given["reduction"], given["row_weights"]) if reduces else out

    @ft.wraps(fn)
    def public(*args: Any, **kwargs: Any) -> Any:
        _public_name = public_name  # which errors show
        try:
            bound = of.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"`{public_name or caller()}`: {error}") from None
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, annotation in of.options.items():
            given[name] = check_option(given[name], name, annotation)
        if of.needs_key or given.get("key") is not None:
            check_key(given["key"])
        counted = check_arguments(given, of)
        if in_order:
            given = sort_arguments(given, of, counted, in_order)
        return finish(body(counted, rows_of_block(given, of) if each_row and not in_order else 0, **given), given)

    vars(public)["__signature__"] = _readable(of.signature)
    return public


def _readable(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the names of kinds, which `help` and notebooks show, instead of what they stand for."""
    shown = {name: _names.get(x.annotation, x.annotation) for name, x in signature.parameters.items()}
    parameters = [x.replace(annotation=shown[name]) for name, x in signature.parameters.items()]
    return signature.replace(parameters=parameters)


class _Name(str):
    """An annotation as it is written."""

    __repr__ = str.__str__


_names: dict[Any, Any] = {kind: _Name(name) for name, kind in vars(kinds).items() if get_origin(kind) is not None}
_names |= {kind | None: _Name(f"{name} | None") for kind, name in _names.items()}
