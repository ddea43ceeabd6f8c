import signal
import threading
from types import FrameType, TracebackType


class Interruption:
    """Holds Ctrl-C back until the state of a run is consistent.

    Between a donated call and the assignment of its result, the old state is gone and the new one has no name: a
    `KeyboardInterrupt` there loses both. Inside this context the first Ctrl-C is only noted; the second one raises.
    """

    def __init__(self):
        self.requested = False
        self._before = None

    def __enter__(self) -> "Interruption":
        own = threading.current_thread() is threading.main_thread()
        if own and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
