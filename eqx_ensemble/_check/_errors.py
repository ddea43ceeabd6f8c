class MemberMismatchError(ValueError):
    """Members that cannot share one stacked tree: they differ in structure, shape, dtype or a static value."""


class CheckpointCorruptError(ValueError):
    """A damaged checkpoint: bits have changed, or a file is truncated or missing.

    **Attributes:**

    - `file`: the path of the damaged file.
    - `leaf`: the path of the damaged leaf in the tree; `None` if the damage is not in one leaf.
    - `member`: the position of the damaged member; `None` if the damage is not in one member.
    """

    def __init__(self, message: str, file: str = "", leaf: str | None = None, member: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.leaf = leaf
        self.member = member
