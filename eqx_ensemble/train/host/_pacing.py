import dataclasses
import math
import threading
from collections.abc import Hashable

import jax
import numpy as np

from ...distributed import broadcast_from_first
from ...plan._pilot import Pilot

_SECONDS_PER_CHUNK = 1.0
_SECONDS_UNTIL_NOTICED = 0.2
_SECONDS_PER_TRIAL = 0.1
_FIRST_STEPS = 32
_MOST_KNOWN = 256


@dataclasses.dataclass
class _Known:
    """Timings of one program in earlier runs, with all members and with fewer."""

    seconds_per_step: float | None = None  # of all members
    seconds_to_compile: float = 0.0
    widths: set[int] = dataclasses.field(default_factory=set)  # that were compiled


_known: dict[Hashable, _Known] = {}
_LOCK = threading.Lock()


class Pacing:
    """Measures steps, to set the length of chunks and to decide whether fewer members are worth another program.

    **Attributes:**

    - `steps`: the number of steps of the next chunk: about a second, or a fifth of one if members may stop, which is
        checked between chunks.
    """

    def __init__(self, pilot: Pilot, *, members_stop: bool = False) -> None:
        self._pilot = pilot
        self._members_stop = members_stop
        self.steps = _FIRST_STEPS
        self._is_fresh = True  # the next call compiles
        self._known = _Known()
        self._seconds_per_step = 0.0
        self._speedup = 1.0
        self._widest: tuple[int, float] | None = None

    def recall(self, key: Hashable) -> None:
        """Starts at the pace of an earlier run of the same program, if any, instead of growing the chunks."""
        if self._pilot.watching or jax.process_count() > 1 or key is None:
            return
        with _LOCK:
            self._known = known = _known.pop(key, self._known)
            _known[key] = known
            if len(_known) > _MOST_KNOWN:
                del _known[next(iter(_known))]
        if (seconds := known.seconds_per_step) is not None:
            self._is_fresh, self._seconds_per_step = False, seconds
            self.steps = max(int(self._seconds_per_chunk / max(seconds, 1e-6)), 1)

    def measure(self, steps: int, seconds: float, *, width: int, steps_left: int | None) -> None:
        """Records the time of steps of `width` members; the first time of a new program includes its compilation."""
        first, self._is_fresh, seconds = self._is_fresh, False, broadcast_from_first(seconds)
        known = self._known
        if first:
            known.seconds_to_compile = max(known.seconds_to_compile, seconds - steps * self._seconds_per_step)
            known.widths.add(width)
        else:
            self._seconds_per_step = seconds / steps
            self._measure_width(width)
        left = None if steps_left is None else steps_left * self._seconds_per_step
        self._is_fresh = self._pilot.note(steps, seconds, seconds_left=left)
        if not first:
            wanted = _SECONDS_PER_TRIAL if self._pilot.watching else self._seconds_per_chunk
            wanted /= max(self._seconds_per_step, 1e-6)
            self.steps = int(np.clip(wanted, 1, 4 * self.steps))

    @property
    def _seconds_per_chunk(self) -> float:
        return min(_SECONDS_PER_CHUNK, _SECONDS_UNTIL_NOTICED) if self._members_stop else _SECONDS_PER_CHUNK

    def _measure_width(self, width: int) -> None:
        """Estimates how time depends on the number of members, from the widest and the current arrays of this run."""
        if self._widest is None:
            self._widest = (width, self._seconds_per_step)
        widest, seconds = self._widest
        if width == widest:
            self._known.seconds_per_step = self._seconds_per_step
        else:
            gain = math.log(seconds / max(self._seconds_per_step, 1e-9)) / math.log(widest / width)
            self._speedup = float(np.clip(gain, 0, 1))

    def pays(self, width: int, before: int, steps_left: int) -> bool:
        """Whether the time saved by `width` members instead of `before` exceeds the cost of another program."""
        if width == before:
            return False
        seconds_left, known = steps_left * self._seconds_per_step, self._known
        cost = 0.0 if width in known.widths else known.seconds_to_compile
        return seconds_left * (1 - (width / before) ** self._speedup) > cost

    @property
    def is_trial(self) -> bool:
        """Whether the next chunk is a trial of a plan."""
        return self._pilot.watching

    def restart(self) -> None:
        """Prepares for another program: the next call compiles, and the plan stays as it is."""
        self._is_fresh = True
        self._pilot.settle()

    def halve(self, steps: int) -> int:
        """Sets the next chunks to half of `steps`. Returns it."""
        self.steps = steps // 2
        return self.steps
