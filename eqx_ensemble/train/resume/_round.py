import os
from typing import Any, final

from ._identity import Identity


@final
class Round:
    """The folder of a run that is one of several of a method, as its `checkpoint`.

    The first run of a process begins with the arguments of the method's call: its identity is that of the call, and it
    resumes where a process before it stopped. The runs after it go on from runs, and only write.

    **Attributes:**

    - `folder`: that of this run.
    - `name`: the method's name in messages.
    - `own`, `functions`: the method's own arguments as texts, which are a part of the identity. Those of functions can
        be compared under the same versions of the libraries only.
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
        """Whether the run goes on from one of this process."""
        return self.identity is not None

    def identify(self, run: Identity) -> Identity:
        """The identity of the call, where that of this run is `run`."""
        if self.identity is None:
            self.identity = self.own | self.functions | run.texts
        return run._replace(texts=self.identity, traced=(*run.traced, *self.functions))
