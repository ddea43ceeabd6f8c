import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .distributed import is_first

if TYPE_CHECKING:
    from tqdm.std import tqdm


_is_open: contextvars.ContextVar[bool] = contextvars.ContextVar("is_open", default=False)
_line: contextvars.ContextVar[Any] = contextvars.ContextVar("line", default=None)


def shown_line() -> Any:
    """The progress line that is open and shown, if any; what a callback puts into its `note` is shown at its end."""
    return _line.get()


@contextlib.contextmanager
def progress_line(*, show: bool | None, description: str, unit: str, total: int | None = None) -> "Iterator[tqdm]":
    """A progress line on standard error, shown after two seconds; by default in a terminal or a notebook:
    `fit, 8 members: epoch 12/40 |######            | [00:05<00:11,  2.41epoch/s, 7 training, best 0.0312]`.

    With several processes, only the first shows it. A notebook, which cannot move between lines, shows that of the
    outermost call. What cannot be written, because nobody reads it any more, is dropped.
    """
    from tqdm.std import tqdm  # here, because it takes a tenth of the time of this library's import

    dropped = contextlib.suppress(OSError)  # a local name: this module's are gone when Python ends

    class Line(tqdm):
        monitor_interval = 0  # else each of these classes starts a thread that never ends
        note = ""

        def display(self, *args: Any, **options: Any) -> Any:
            with dropped:
                return super().display(*args, **options)

        def close(self) -> None:
            with dropped:
                super().close()

    if show is None:
        show = sys.stderr.isatty() or ("ipykernel" in sys.modules and not _is_open.get())
    show = bool(show and is_first())
    count = "{n_fmt}" if total is None else "{n_fmt}/{total_fmt} |{bar:20}|"
    line = f"{{desc}}: {unit} {count} [{{elapsed}}<{{remaining}}, {{rate_fmt}}{{postfix}}]"
    with Line(total=total, desc=description, unit=unit, disable=not show, delay=2, miniters=0, bar_format=line) as bar:
        tokens = _is_open.set(_is_open.get() or show), _line.set(bar if show else None)
        try:
            yield bar
        finally:
            _is_open.reset(tokens[0])
            _line.reset(tokens[1])


def members_in_words(count: int) -> str:
    """`1 member`, `8 members`."""
    return "1 member" if count == 1 else f"{count} members"
