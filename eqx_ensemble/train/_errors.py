from pickle import PicklingError, dumps
from typing import Any


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far.

    In another process `run` is `None` if it cannot be pickled; a note says why.
    """

    def __init__(self, message: str, run: Any) -> None:
        super().__init__(message)
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), _state_of(self)


class NotSavedError(OSError):
    """Raised by [`eqx_ensemble.fit`][] when a checkpoint cannot be written; `run` is the run so far.

    In another process `run` is `None` if it cannot be pickled; a note says why.
    """

    def __init__(self, error: OSError, run: Any) -> None:
        text = f"`fit` ended after {int(run.train_state.step)} steps, because the run could not be saved: "
        text += f"{error.strerror or error}\nThis error's `run` is the run so far; the same call resumes from the last "
        super().__init__(error.errno, f"{text}checkpoint.")
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), _state_of(self)


def _again(kind: type[Exception], arguments: tuple) -> Exception:
    """The error with its message, without the constructors above, which also need a run."""
    error = kind.__new__(kind)
    if isinstance(error, OSError):
        OSError.__init__(error, *arguments)
    else:
        Exception.__init__(error, *arguments)
    return error


def _state_of(error: DivergedError | NotSavedError) -> dict[str, Any]:
    """The error's attributes; `run` becomes `None` if it cannot be pickled, for example because of `jax.nn.relu`."""
    try:
        dumps(error.run)
    except (PicklingError, AttributeError, TypeError) as problem:
        note = f"`run` is `None` here, because it cannot be pickled: {problem}"
        return vars(error) | {"run": None, "__notes__": [*getattr(error, "__notes__", ()), note]}
    return vars(error)
