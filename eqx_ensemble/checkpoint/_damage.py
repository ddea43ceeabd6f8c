from typing import Any

from .._check import CheckpointCorruptError
from ._check import damage_message


def corrupt_error(
    file: Any, reason: str, *, leaf: str | None = None, member: int | None = None
) -> CheckpointCorruptError:
    """The error for a damaged file; the caller raises it."""
    message = damage_message(file, reason, leaf=leaf, member=member)
    return CheckpointCorruptError(message, str(file), leaf, member)
