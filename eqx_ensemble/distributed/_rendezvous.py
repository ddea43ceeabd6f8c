"""Who is there, before JAX is told to wait for all: it ends a process that waits in vain, and does not say for whom.

Process 0 listens where JAX's coordinator will; the others call there with `{"process": [id, count]}`, and are told from
time to time who is missing. When nobody is, all go on. Everything is one line of JSON.
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


class Call(NamedTuple):
    """One process of several that are to find each other."""

    host: str
    port: int
    num_processes: int
    process_id: int
    timeout: float

    @property
    def address(self) -> str:
        """Where process 0 is."""
        return joined(self.host, self.port)


def joined(host: str, port: int) -> str:
    """`host:port`, with brackets around what has colons of its own."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can get there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def bind_address(host: str, port: int) -> str:
    """Where process 0 listens: not on the network when all processes are on one machine."""
    told = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    return told or joined(host if is_loopback(host) else "::", port)


def everyone_is_here(call: Call) -> None:
    """Returns when all processes have come, and raises in all that did when one has not in time."""
    (_first if call.process_id == 0 else _other)(call)


def _first(call: Call) -> None:
    deadline = time.monotonic() + call.timeout
    with _listening(call) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        roll = _Roll(call, selector)
        told = 0.0
        while roll.missing and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, _BETWEEN_NEWS)):
                if key.fileobj is listener:
                    roll.arrived(listener)
                else:
                    roll.heard(key.fileobj)
            if time.monotonic() > told + _BETWEEN_NEWS:
                roll.tell(over=False)
                told = time.monotonic()
        listener.close()  # before the others are told, so that whom they reach there next is JAX
        roll.tell(over=True)
        roll.leave()
    if roll.missing:
        raise TimeoutError(
            missing_message(roll.never_came or roll.missing, call.num_processes, call.address, call.timeout)
        )


def _listening(call: Call) -> socket.socket:
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
        raise OSError(error.errno, address_message(joined(host, port), error)) from error


class _Roll:
    """Who has come to process 0, and what they said."""

    def __init__(self, call: Call, selector: selectors.BaseSelector):
        self._call = call
        self._selector = selector
        self._said: dict[socket.socket, bytes] = {}
        self._here: dict[int, socket.socket] = {}
        self._came: set[int] = set()

    @property
    def missing(self) -> list[int]:
        return [number for number in range(1, self._call.num_processes) if number not in self._here]

    @property
    def never_came(self) -> list[int]:
        """Those of the missing who did not lose patience either."""
        return [number for number in self.missing if number not in self._came]

    def arrived(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(0)
        self._said[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def heard(self, connection: Any) -> None:
        """Reads what a process says: who it is, or, by closing, that it is gone."""
        try:
            part = connection.recv(_LONGEST_CALL)
        except OSError:
            part = b""
        self._said[connection] += part
        if not part or len(self._said[connection]) > _LONGEST_CALL:
            self._drop(connection)
        elif self._said[connection].endswith(b"\n"):
            self._enter(connection)

    def _enter(self, connection: socket.socket) -> None:
        call = _message(self._said[connection])
        if call is None or "process" not in call:
            return self._drop(connection)  # no process of ours
        number, count = call["process"]
        reason = None
        if count != self._call.num_processes:
            reason = f"it waits for {self._call.num_processes} processes, and this one was told of {count}"
        elif not 0 < number < count or self._here.get(number, connection) is not connection:
            reason = f"another process {number} is there"
        if reason is None:
            self._here[number] = connection
            self._came.add(number)
            return self._tell(connection, over=False)
        _send(connection, {"refused": reason})
        return self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._here = {number: other for number, other in self._here.items() if other is not connection}
        del self._said[connection]
        connection.close()

    def tell(self, *, over: bool) -> None:
        """Tells all who came who did not; `over` when nobody waits any longer."""
        for connection in self._here.values():
            self._tell(connection, over=over)

    def _tell(self, connection: socket.socket, *, over: bool) -> None:
        missing = (self.never_came or self.missing) if over else self.missing
        _send(connection, {"missing": missing, "over": over})

    def leave(self) -> None:
        """Closes all connections, after the others did, so that the port is free."""
        for connection in self._said:
            connection.settimeout(1.0 if connection in self._here.values() else 0.0)
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
        pass  # it is gone, or does not listen: reading will tell


def _other(call: Call) -> None:
    deadline = time.monotonic() + call.timeout
    missing, stranger = None, False
    while time.monotonic() < deadline:
        for answer in _answers(call, deadline):
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


def _answers(call: Call, deadline: float) -> Iterator[dict[str, Any] | None]:
    """What process 0 says until it hangs up; `None` for what it cannot have said. Nothing where nobody listens."""
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
                    # Longer than process 0 waits, if it began at the same time, to hear from it who is missing.
                    connection.settimeout(max(deadline + 2 * _BETWEEN_NEWS - time.monotonic(), _PATIENCE))
            if not heard:
                yield None
    except OSError:
        return  # it is not there yet, or its name is not known yet


def _message(line: bytes) -> dict[str, Any] | None:
    """What a line says, of the three things that processes say to each other; `None` for all else."""
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
