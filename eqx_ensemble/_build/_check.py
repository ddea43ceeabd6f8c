import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from .._caller import caller
from .._check import check_key_shape, is_integer, kind_text
from .._foreign import from_foreign

T = TypeVar("T")


def check_signature(make: Callable[..., Any], arguments: Iterable[str]) -> None:
    """Raises unless `make` can be called with a key and the per-member arguments."""
    try:
        # The signature of the outermost decorator: that of the function inside may differ.
        signature = inspect.signature(make, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    named = dict.fromkeys(arguments)
    try:
        signature.bind(None, **named)
    except TypeError as error:
        called = ", ".join(["key", *(f"{name}={name}" for name in named)])
        inner = getattr(make, "func", make)
        word = getattr(inner, "__name__", type(inner).__name__)
        raise TypeError(
            f"`build` makes a member as `make({called})`, with the key as first argument; `{word}` cannot be "
            f"called like that: {error}.\n"
            f"Write a function: `lambda {', '.join(['key', *named])}: {word}(..., key=key)`."
        ) from None


def check_count(**counts: int | None) -> int:
    """Raises unless all given sources agree on the number of members. Returns it."""
    given = {name: count for name, count in counts.items() if count is not None}
    if not given:
        raise TypeError(
            "`build` needs to know how many members to make: pass `num_members`, `ids`, `keys`, `zip` or `product`."
        )
    for count in given.values():
        if not is_integer(count):
            raise TypeError(f"`build` needs an integer number of members, got {count!r}.")
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in given.items())
        raise ValueError(f"`build` got different numbers of members: {listed}.")
    count = int(next(iter(given.values())))
    if count < 1:
        raise ValueError(f"`build` makes at least one member, got `{next(iter(given))}` of {count}.")
    return count


def check_arguments(zip: Mapping[str, Any] | None, product: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises unless per-member arguments are arrays of numbers with a leading axis, by name. Returns them."""
    if zip is not None and product is not None:
        raise TypeError("`build` takes `zip` (one value per member) or `product` (all combinations), not both.")
    chosen = zip if product is None else product
    if chosen is None:
        return {}
    option = "zip" if product is None else "product"
    if not isinstance(chosen, Mapping):
        raise TypeError(f"`build` needs `{option}` as a dict from name to values, got {kind_text(chosen)}.")
    chosen = {key: from_foreign(values, f"{option}[{key!r}]") for key, values in chosen.items()}
    for name, values in chosen.items():
        array = np.asarray(values) if not isinstance(values, jax.Array) else values
        if array.dtype.kind in "OUS":
            raise TypeError(
                f"`build` needs `{option}[{name!r}]` to hold numbers, because members of one ensemble differ only in "
                f"arrays; got {values!r}.\nBuild one ensemble per choice."
            )
        if array.ndim == 0:
            raise ValueError(
                f"`build` needs one value per member in `{option}[{name!r}]`, got the single value {values!r}."
            )
    return dict(chosen)


_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_OF_SHAPES = "concrete values of integer type"  # in a TypeError of `jax.numpy.zeros` and the like
_LIBRARIES = ("jax", "jaxlib", "equinox", "jaxtyping", "beartype", "numpy", "eqx_ensemble")
_ONE_BY_ONE = "`stack([make(key) for key in member_keys(key, num_members)])` makes the same members one by one"
_FIXES = {
    "shape": "A number that decides a shape, such as a width, makes another architecture: fix it outside of `make`, "
    "and build one ensemble for each: `[build(partial(make, width=width), 4, key=key) for width in widths]`.",
    "choice": "Choose between arrays by `jnp.where` or `jax.lax.cond`. Without changing `make`: "
    f"{_ONE_BY_ONE}, if all of them have one architecture.",
    "value": f"Use `jax.numpy` instead of NumPy and Python numbers. Without changing `make`: {_ONE_BY_ONE}.",
}


@contextlib.contextmanager
def explain_make(make: Callable[..., Any]) -> Iterator[None]:
    """Replaces tracing errors of JAX by an error that names the constructor, the line and a fix."""
    try:
        yield
    except Exception as error:
        if is_model(make):
            raise _model_error(make) from error
        if not isinstance(error, _TRACED) and not (isinstance(error, TypeError) and _OF_SHAPES in str(error)):
            raise
        raise TypeError(_concrete_message(make, error)) from error


def is_model(make: Any) -> bool:
    """Whether `make` may be a model instead of a function that makes one."""
    return isinstance(make, eqx.Module) and not isinstance(make, eqx.Partial) and not hasattr(make, "__func__")


def check_made(make: Any, one: Any) -> None:
    """Raises if `make` is a model, and its result a prediction."""
    if is_model(make) and eqx.is_array(one):
        raise _model_error(make)


def _model_error(make: Any) -> TypeError:
    return TypeError(
        f"`build` needs a function that makes one member from a key, got a model, `{type(make).__name__}`.\n"
        "Write `build(lambda key: Model(..., key=key), num_members, key=key)`; a list of models goes to `stack`."
    )


def _concrete_message(make: Callable[..., Any], error: Exception) -> str:
    kind = "value"
    if isinstance(error, jax.errors.TracerIntegerConversionError) or _OF_SHAPES in str(error):
        kind = "shape"
    elif isinstance(error, jax.errors.TracerBoolConversionError | jax.errors.NonConcreteBooleanIndexError):
        kind = "choice"
    elif "`int` function" in str(error):
        kind = "shape"
    return (
        "`build` runs the constructor once for all members, so that arrays that depend on the key or on per-member "
        f"arguments have no concrete value in it; `{_name_of(make)}` needs one{_where(error)}.\n"
        f"  {type(error).__name__}: {str(error).splitlines()[0]}\n{_FIXES[kind]}"
    )


def _name_of(make: Callable[..., Any]) -> str:
    inner = getattr(make, "func", make)
    return getattr(inner, "__name__", type(inner).__name__)


def _where(error: Exception) -> str:
    """The innermost line of user code in the traceback."""
    found, trace = "", error.__traceback__
    while trace is not None:
        room = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if room not in _LIBRARIES:
            found = f", in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def check_keys(keys: Any) -> int:
    """Raises unless `keys` is a vector of threefry keys. Returns its length."""
    shape = check_key_shape(keys, wanted="one key per member")
    if len(shape) != 1:
        got = "one single key" if shape == () else f"keys of shape {shape}"
        raise TypeError(
            f"`{caller()}` needs one key per member as `keys`, shape (members,); got {got}.\n"
            "One key for all is passed with the number of members: `build(make, num_members, key=key)`."
        )
    if shape[0] == 0:
        raise ValueError(f"`{caller()}` needs at least one key, got none.")
    return shape[0]
