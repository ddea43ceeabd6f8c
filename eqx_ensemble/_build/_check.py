import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from .._check import check_key_shape, is_integer, kind_text
from .._foreign import from_foreign

T = TypeVar("T")


def check_make(make: Any) -> None:
    """A function that makes one member."""
    if isinstance(make, eqx.Module):
        raise TypeError(
            f"`build` needs a function that makes one member from a key, got a model, `{type(make).__name__}`.\n"
            "Write `build(lambda key: Model(..., key=key), num_members, key=key)`; a list of models goes to `stack`."
        )
    if isinstance(make, list | tuple):
        raise TypeError("`build` makes members from a function; a list of models is stacked by `stack(models)`.")
    if not callable(make):
        raise TypeError(f"`build` needs a function that makes one member from a key, got {make!r}.")


def check_signature(make: Callable[..., Any], arguments: Iterable[str]) -> None:
    """The function can be called with a key and the per-member arguments."""
    try:
        # Of decorated functions the outermost counts: the one inside may be called in another way.
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
    """The number of members on which all given sources agree."""
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


def check_no_key(key: Any) -> None:
    """There is no root key if each member has its own."""
    if key is not None:
        raise TypeError("`build` takes `keys` (one per member) or `key` (one for all), not both.")


def check_arguments(zip: Mapping[str, Any] | None, product: Mapping[str, Any] | None) -> dict[str, Any]:
    """The per-member arguments: names with array-like values that have a leading axis."""
    if zip is not None and product is not None:
        raise TypeError("`build` takes `zip` (one value per member) or `product` (all combinations), not both.")
    chosen = zip if product is None else product
    if chosen is None:
        return {}
    option = "zip" if product is None else "product"
    if not isinstance(chosen, Mapping):
        raise TypeError(f"`build` needs `{option}` as a dict from name to values, got {kind_text(chosen)}.")
    chosen = {key: from_foreign(values, f"{option}[{key!r}]", name="build") for key, values in chosen.items()}
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


_ALL_AT_ONCE = (
    "`build` runs the constructor for all members at once, so arrays that depend on the key or on "
    "per-member arguments have no concrete value in it."
)


@contextlib.contextmanager
def explain_make() -> Iterator[None]:
    """Adds the likely fix to errors of constructors that need concrete values."""
    try:
        yield
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        error.add_note(f"{_ALL_AT_ONCE}\nBuild the members one by one instead: `stack([make(key) for key in keys])`.")
        raise
    except TypeError as error:
        if "concrete values of integer type" in str(error):
            error.add_note(
                f"{_ALL_AT_ONCE}\nA number that decides a shape, such as a width, makes another architecture: build "
                "one ensemble for each."
            )
        raise


def check_keys(keys: Any, *, name: str) -> int:
    """A vector of threefry keys; its length is returned."""
    shape = check_key_shape(keys, name=name, wanted="one key per member")
    if len(shape) != 1:
        got = "one single key" if shape == () else f"keys of shape {shape}"
        raise TypeError(
            f"`{name}` needs one key per member as `keys`, shape (members,); got {got}.\n"
            "One key for all is passed with the number of members: `build(make, num_members, key=key)`."
        )
    if shape[0] == 0:
        raise ValueError(f"`{name}` needs at least one key, got none.")
    return shape[0]
