"""Breaks the disk under the writer of checkpoints, at any of its operations."""

import os

from eqx_ensemble.checkpoint import _disk

OPERATIONS = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "replace", "remove", "remove_folder")
OPERATIONS += ("remove_empty_folder", "open_or_create")
HOWS = ("before", "amid", "after")


class Killed(BaseException):
    """The process ends: nothing after it runs."""


class Layer:
    """Under the writer, within `with`: counts what reaches the disk, records it, and stops at one place.

    With `error`, that operation is refused; with `meanwhile`, a function, it is done after something else has happened.
    """

    def __init__(self, *, stop=None, how="before", error=None, meanwhile=None):
        self.count, self.stop, self.how, self.error, self.meanwhile = 0, stop, how, error, meanwhile
        self.log, self.open, self.dead = [], {}, False
        self.stopped = None

    def __enter__(self):
        self.true = {name: getattr(_disk, name) for name in OPERATIONS}
        for name, operation in self.true.items():
            setattr(_disk, name, self.wrapped(name, operation))
        return self

    def __exit__(self, *_):
        for name, operation in self.true.items():
            setattr(_disk, name, operation)

    def wrapped(self, name, operation):
        def run(*args):
            if self.dead:
                raise Killed
            self.count += 1
            if self.count - 1 == self.stop:
                self.stopped = name
                if self.meanwhile is not None:
                    self.meanwhile()
                    return operation(*args)
                if self.error is not None:
                    raise OSError(self.error, os.strerror(self.error))
                self.dead = True
                if self.how == "amid":
                    self.amid(name, operation, args)
                elif self.how == "after":
                    operation(*args)
                raise Killed
            done = operation(*args)
            self.record(name, args, done)
            return done

        return run

    def amid(self, name, operation, args):
        if name == "write":
            operation(args[0], args[1][: len(args[1]) // 2])
        elif name == "remove_folder":
            for file in sorted(args[0].iterdir())[:1]:
                file.unlink()

    def record(self, name, args, done):
        if name in ("create", "open_or_create"):
            self.open[done] = args[0]
        if name in ("write", "sync"):
            args = (self.open[args[0]], *(bytes(part[:done]) for part in args[1:]))
        self.log.append((name, *args))
