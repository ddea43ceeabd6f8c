"""The version of the user's code that a program is compiled from.

Compiled programs are cached by functions and by the classes in trees. A notebook changes both in place: `%autoreload 2`
gives an existing function another `__code__`, and a cell gives a variable that a function reads another value. JAX then
runs the old program, also in a new call that is meant to use the new code.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ._code_walk import Walk, functions_in

_MOST_KNOWN = 1024


class Code:
    """What functions and classes do at one time, by their code and by the variables that it reads.

    Compared by identity: `code_of` returns the same object while nothing has changed. Installed libraries are left out.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._found: Any = Walk(roots).found
        self.is_users = any(place.is_users for place in self._found)

    def is_current(self) -> bool:
        """Whether nothing has changed since."""
        return self._found is not None and all(place.is_current() for place in self._found)

    def forget(self) -> None:
        """Ends its use as that of current code: keys of programs keep it, and it may hold a list or a dict."""
        self._found = None


_known: OrderedDict[tuple[int, ...], tuple[Code, list[weakref.ref]]] = OrderedDict()
_lock = threading.Lock()


def code_of(roots: Iterable[Any]) -> Code | None:
    """The code of functions, classes and objects that may be called; `None` if all of it is in installed libraries."""
    own = list(functions_in(roots))
    if not own:
        return None
    key = tuple(map(id, own))
    found = _known.get(key)
    if found is not None and found[0].is_current():
        return found[0] if found[0].is_users else None
    code = Code(own)
    refs = [weakref.ref(x, lambda _: _forget(key)) for x in own]  # before an id is used for another object
    with _lock:
        _forget(key)
        _known[key] = code, refs
        while len(_known) > _MOST_KNOWN:
            _forget(next(iter(_known)))
    return code if code.is_users else None


def _forget(key: tuple[int, ...]) -> None:
    found = _known.pop(key, None)
    if found is not None:
        found[0].forget()
