"""Connects the processes before JAX does, so that an error can name the missing ones.

If a process is missing, JAX alone ends all others after its timeout by a signal (`Terminating process ...
DEADLINE_EXCEEDED`, in 0.9.0, 0.10.1 and 0.12.0), which no program can catch, and names none of them.

Process 0 listens at the address of JAX's coordinator; the others connect to it with `{"process": [id, count]}`, and
receive the missing processes at intervals. When none is missing, all continue. Every message is one line of JSON.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._check import address_message, check_coordinator, missing_message, no_answer_message, refusal_message

_PATIENCE = 0.1  # seconds between two attempts of a process to reach the first one
_BETWEEN_NEWS = 1.0  # seconds
_LONGEST_CALL = 200  # bytes
_LONGEST_ANSWER = 2**20


class Rendezvous(NamedTuple):
    """One of several processes, and the address at which they connect."""

    host: str
    port: int
    num_processes: int
    process_id: int
    timeout: float

    @property
    def address(self) -> str:
        """The address of process 0."""
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def bind_address(host: str, port: int) -> str:
    """The address at which process 0 listens: not on the network when all processes are on one machine."""
    given = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    return given or join_address(host if is_loopback(host) else "::", port)


def wait_for_all(call: Rendezvous) -> None:
    """Waits until all processes are connected; after the timeout, raises in those that are."""
    (_first if call.process_id == 0 else _other)(call)


def _first(call: Rendezvous) -> None:
    deadline = time.monotonic() + call.timeout
    with _listen(call) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        attendance = _Attendance(call, selector)
        sent_at = 0.0
        while attendance.missing and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, _BETWEEN_NEWS)):
                if key.fileobj is listener:
                    attendance.accept(listener)
                else:
                    attendance.receive(key.fileobj)
            if time.monotonic() > sent_at + _BETWEEN_NEWS:
                attendance.send(over=False)
                sent_at = time.monotonic()
        listener.close()  # before the last message, so that the others next reach JAX at this address
        attendance.send(over=True)
        attendance.close()
    if attendance.missing:
        missing = attendance.never_connected or attendance.missing
        raise TimeoutError(missing_message(missing, call.num_processes, call.address, call.timeout))


def _listen(call: Rendezvous) -> socket.socket:
    host, port = check_coordinator(bind_address(call.host, call.port))
    everywhere = host in ("::", "0.0.0.0")
    dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        if everywhere:
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, address_message(join_address(host, port), error)) from error


class _Attendance:
    """The processes that have connected to process 0, and the data received from them."""

    def __init__(self, call: Rendezvous, selector: selectors.BaseSelector) -> None:
        self._call = call
        self._selector = selector
        self._received: dict[socket.socket, bytes] = {}
        self._connected: dict[int, socket.socket] = {}
        self._ever_connected: set[int] = set()

    @property
    def missing(self) -> list[int]:
        return [number for number in range(1, self._call.num_processes) if number not in self._connected]

    @property
    def never_connected(self) -> list[int]:
        """The missing processes that never connected."""
        return [number for number in self.missing if number not in self._ever_connected]

    def accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(0)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def receive(self, connection: Any) -> None:
        """Reads from a process: its number, or the end of its connection."""
        try:
            part = connection.recv(_LONGEST_CALL)
        except OSError:
            part = b""
        self._received[connection] += part
        if not part or len(self._received[connection]) > _LONGEST_CALL:
            self._drop(connection)
        elif self._received[connection].endswith(b"\n"):
            self._enter(connection)

    def _enter(self, connection: socket.socket) -> None:
        call = _message(self._received[connection])
        if call is None or "process" not in call:
            return self._drop(connection)  # not a process of this program
        number, count = call["process"]
        reason = None
        if count != self._call.num_processes:
            reason = f"it waits for {self._call.num_processes} processes, and this one for {count}"
        elif not 0 < number < count or self._connected.get(number, connection) is not connection:
            reason = f"process {number} is already connected"
        if reason is None:
            self._connected[number] = connection
            self._ever_connected.add(number)
            return _send(connection, {"missing": self.missing, "over": False})
        _send(connection, {"refused": reason})
        return self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connected = {number: other for number, other in self._connected.items() if other is not connection}
        del self._received[connection]
        connection.close()

    def send(self, *, over: bool) -> None:
        """Sends the missing processes to all that are connected; `over` with the last message."""
        missing = (self.never_connected or self.missing) if over else self.missing
        for connection in self._connected.values():
            _send(connection, {"missing": missing, "over": over})

    def close(self) -> None:
        """Closes all connections after the others did, so that the port is free."""
        for connection in self._received:
            connection.settimeout(1.0 if connection in self._connected.values() else 0.0)
            with connection:
                try:
                    while connection.recv(_LONGEST_CALL):
                        pass
                except OSError:
                    pass


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # closed, or not reading: the next read detects it


def _other(call: Rendezvous) -> None:
    deadline = time.monotonic() + call.timeout
    missing, stranger = None, False
    while time.monotonic() < deadline:
        for answer in _read_answers(call, deadline):
            if answer is None:
                stranger = True
            elif "refused" in answer:
                raise ValueError(refusal_message(answer["refused"], call.address))
            else:
                missing = answer["missing"]
                if answer["over"] and missing:
                    raise TimeoutError(missing_message(missing, call.num_processes, call.address, call.timeout))
                if answer["over"]:
                    return
        time.sleep(_PATIENCE)
    if missing:
        raise TimeoutError(missing_message(missing, call.num_processes, call.address, call.timeout))
    raise TimeoutError(no_answer_message(call.address, call.timeout, process_id=call.process_id, stranger=stranger))


def _read_answers(call: Rendezvous, deadline: float) -> Iterator[dict[str, Any] | None]:
    """The messages of process 0 until it closes; `None` for any others. Empty if nothing listens."""
    try:
        left = max(deadline - time.monotonic(), _PATIENCE)
        with socket.create_connection((call.host, call.port), timeout=left) as connection:
            _send(connection, {"process": [call.process_id, call.num_processes]})
            heard = False
            with connection.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_ANSWER):
                    heard = True
                    answer = _message(line)
                    yield None if answer is None or "process" in answer else answer
                    # Longer than process 0 waits, if it began at the same time, to receive its last message.
                    connection.settimeout(max(deadline + 2 * _BETWEEN_NEWS - time.monotonic(), _PATIENCE))
            if not heard:
                yield None
    except OSError:
        return  # it is not listening yet, or its name is not known yet


def _message(line: bytes) -> dict[str, Any] | None:
    """The message in a line, one of three kinds; `None` for anything else."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"process": [int(), int()] as numbers} if not any(isinstance(number, bool) for number in numbers):
            return said
        case {"refused": str()}:
            return said
        case {"missing": list(numbers), "over": bool()} if all(type(number) is int for number in numbers):
            return said
    return None
