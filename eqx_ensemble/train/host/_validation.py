import jax.numpy as jnp

from ...distributed import to_host
from .._status import Status
from ..compiled._chunk import compiled_validation
from ..compiled._program import Program
from ..compiled._select import LEFT
from ._active import ActiveMembers
from ._recording import Recording


def validate(program: Program, members: ActiveMembers, recording: Recording, occasion: int) -> None:
    """Scores members between chunks, if there are validation data."""
    if program.score is None:
        return
    carry, scores = compiled_validation((program, members.inputs, jnp.int32(occasion)), members.carry)
    recording.add_scores(to_host(scores), members.slots, of_all=occasion != LEFT)
    members.carry = carry


def validate_stopped(program: Program, members: ActiveMembers, recording: Recording) -> None:
    """Scores members that stopped within an epoch, if there are any whose last weights no validation has seen."""
    moving, selection = members.carry.moving, members.carry.selection
    if program.score is None or selection is None:
        return
    status, stopped_at, scored = to_host((moving.status, moving.stopped_at, selection.scored))
    if ((status == Status.STOPPED) & (stopped_at != scored)).any():
        validate(program, members, recording, LEFT)
