"""Checks of options: flags, words, functions, numbers, sequences and paths."""

import importlib.metadata
import importlib.util
import math
import operator
import os
import re
from collections.abc import Collection
from typing import Any, TypeGuard

import numpy as np

from .._caller import caller
from ._leaves import kind_text


def missing_extra_message(what: str, package: str, extra: str) -> str:
    """Names the extra to install."""
    return f"`{what}` needs {package}.\nInstall it: `pip install 'eqx_ensemble[{extra}]'`."


def check_installed(package: str, *, what: str, extra: str) -> None:
    """Raises `ImportError` unless an optional package, needed for `what`, is installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(missing_extra_message(what, package, extra))


def check_version(package: str, oldest: tuple[int, ...], *, what: str, extra: str) -> None:
    """Raises `ImportError` unless an installed package is recent enough."""
    found = importlib.metadata.version(package)
    if tuple(int(number) for number in re.findall(r"\d+", found)[: len(oldest)]) < oldest:
        raise ImportError(
            f"`{what}` needs {package} {'.'.join(map(str, oldest))} or newer, found {found}.\n"
            f"Update it: `pip install -U 'eqx_ensemble[{extra}]'`."
        )


def check_flag(value: Any, argument: str) -> bool:
    """Raises unless `value` is `True` or `False`; other values are likely meant for another argument. Returns it."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{caller()}` needs `{argument}` to be `True` or `False`, got {_value_text(value)}.")
    return bool(value)


def check_word(value: Any, argument: str, choices: Collection[str | None]) -> None:
    """Raises unless `value` is one of `choices`; arrays, whose comparison has no truth value, are not compared."""
    if not isinstance(value, str | None) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{caller()}` needs `{argument}` to be one of {listed}, got {_value_text(value)}.")


def check_optional_text(value: Any, argument: str) -> None:
    """Raises unless `value` is a string or `None`."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{caller()}` needs `{argument}` to be a string, got {_value_text(value)}.")


def check_function(value: Any, argument: str, *, example: str) -> None:
    """Raises unless `value` is callable."""
    if not callable(value):
        raise TypeError(
            f"`{caller()}` needs `{argument}` to be a function, got {_value_text(value)}.\nFor example `{example}`."
        )


def check_optional_function(value: Any, argument: str, *, example: str) -> None:
    """Raises unless `value` is callable or `None`."""
    if value is not None:
        check_function(value, argument, example=example)


def check_number(value: Any, argument: str, *, least: float | int = -math.inf, most: float | int = math.inf) -> float:
    """Raises unless `value` is a finite real number from `least` to `most`. Returns it as a float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number) or np.iscomplexobj(value):
        raise TypeError(f"`{caller()}` needs `{argument}` to be a number, got {_value_text(value)}.")
    if not math.isfinite(value) or not least <= value <= most:
        if least == -math.inf and most == math.inf:
            wanted = "finite"
        elif most == math.inf:
            wanted = f"at least {least:g} and finite"
        else:
            wanted = f"between {least:g} and {most:g}"
        raise ValueError(f"`{caller()}` needs `{argument}` to be {wanted}, got {value!r}.")
    return float(value)


def check_axis(value: Any, argument: str) -> int:
    """Raises unless `value` is an integer, which counts from the end if negative. Returns it."""
    if not is_integer(value):
        raise TypeError(f"`{caller()}` needs `{argument}` to be an integer, got {_value_text(value)}.")
    return int(value)


def check_sequence(values: Any, argument: str, *, of: str) -> list[Any]:
    """Raises unless `values` is iterable and not a string. Returns a list."""
    try:
        iterator = None if isinstance(values, str | bytes) else iter(values)
    except TypeError:
        iterator = None
    if iterator is None:
        raise TypeError(f"`{caller()}` needs `{argument}` to be a list of {of}, got {_value_text(values)}.")
    return list(iterator)


def check_path(value: Any, argument: str) -> None:
    """Raises unless `value` is a path: a string that is not empty, or an `os.PathLike`."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{caller()}` needs `{argument}` to be a path, got {_value_text(value)}.")
    if not os.fspath(value):
        raise ValueError(f"`{caller()}` needs `{argument}` to be a path, got an empty string.")


def _value_text(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | bool | None) else kind_text(value)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether `value` is a Python or NumPy integer, and not a boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(value: Any, argument: str, *, least: int) -> int:
    """Raises unless `value` is an integer, or an integer scalar array, of at least `least`. Returns it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`{caller()}` needs an integer `{argument}`, got {value!r}.")
    if number < least:
        raise ValueError(f"`{caller()}` needs `{argument}` of at least {least}, got {number}.")
    return number


def check_positive_int(value: Any, argument: str) -> int:
    """Raises unless `value` is an integer of at least 1. Returns it."""
    return check_integer(value, argument, least=1)


MOST_STEPS = 2**31 - 1
"""Steps are counted in 32 bits inside compiled programs."""


def check_counter(value: Any, argument: str) -> int:
    """Raises unless `value` is an integer from 1 to `MOST_STEPS`. Returns it."""
    number = check_positive_int(value, argument)
    if number > MOST_STEPS:
        raise ValueError(
            f"`{caller()}` needs `{argument}` of at most {MOST_STEPS}, because compiled programs count in 32 bits; "
            f"got {number}."
        )
    return number
