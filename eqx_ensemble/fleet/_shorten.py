"""Shortens error messages that workers return: a failed assertion on an array can have megabytes."""

from typing import TypeVar

_MOST = 10_000  # characters

E = TypeVar("E", bound=Exception)


def shorten(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def with_short_message(error: E) -> E:
    """The error, with long strings among its arguments shortened."""
    if any(isinstance(arg, str) and len(arg) > _MOST for arg in error.args):
        error.args = tuple(shorten(arg) if isinstance(arg, str) else arg for arg in error.args)
    return error
