import contextlib
import contextvars
from collections.abc import Iterator

# Calls of `fit` for a part of an ensemble, of which no member may be left to train.

_may_be_idle: contextvars.ContextVar[bool] = contextvars.ContextVar("may_be_idle", default=False)


@contextlib.contextmanager
def allow_idle() -> Iterator[None]:
    """Within it, `fit` accepts members of which none trains: a part of an ensemble in which others do."""
    token = _may_be_idle.set(True)
    try:
        yield
    finally:
        _may_be_idle.reset(token)


def may_be_idle() -> bool:
    """Whether the current call of `fit` accepts members of which none trains."""
    return _may_be_idle.get()
