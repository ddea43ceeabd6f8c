import os
from typing import Any, final

from ._identity import Identity


@final
class Round:
    """The `checkpoint` of a run that is one of several runs of a method.

    The first run in a process starts from the arguments of the method's call: it has the identity of that call, and
    resumes where an earlier process stopped. Later runs continue a run of this process, and only write.

    **Attributes:**

    - `folder`: the folder of this run.
    - `name`: the method's name in messages.
    - `own`, `functions`: texts of the method's own arguments, which are part of the identity. Those of functions are
        comparable only under the same versions of the libraries.
    - `identity`: the identity of the call, known after the first run of this process.
    """

    def __init__(
        self,
        folder: Any,
        *,
        name: str,
        own: dict[str, str],
        functions: dict[str, str],
        identity: dict[str, str] | None,
    ) -> None:
        self.folder, self.name = folder, name
        self.own, self.functions, self.identity = own, functions, identity

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    @property
    def goes_on(self) -> bool:
        """Whether the run continues one of this process."""
        return self.identity is not None

    def identify(self, run: Identity) -> Identity:
        """The identity `run` of this run, replaced by that of the call."""
        if self.identity is None:
            self.identity = self.own | self.functions | run.texts
        return run._replace(texts=self.identity, traced=(*run.traced, *self.functions))
