"""Several processes as one program: how they connect, and what is the same in all of them afterwards."""

import contextlib
import os
import pathlib
import re
import socket
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.distributed import _initialise, _rendezvous
from eqx_ensemble.distributed._check import missing_message
from eqx_ensemble.distributed._environment import CLUSTERS, OURS, TORCH, Settings, find_settings
from eqx_ensemble.distributed._rendezvous import Rendezvous, wait_for_all

from ..children import Child

HERE = pathlib.Path(__file__).parent
SOMEONE_SAYS = {*OURS, *TORCH, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE", "JAX_COORDINATOR_ADDRESS"}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch):
    for name in SOMEONE_SAYS:
        monkeypatch.delenv(name, raising=False)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def processes(*arguments, count=2, ranks=(0, 1)):
    """The given processes of `together.py`."""
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parent.parent),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
    }
    command = [sys.executable, str(HERE / "together.py"), *arguments]
    children = [Child(command, common | {"RANK": str(i)}) for i in ranks]
    try:
        yield children
    finally:
        for child in children:
            child.kill()


class TestProcesses:
    def test_everything_in_two_of_them(self):
        with processes("everything") as children:
            for child in children:
                code, out, err = child.finish(120)
                assert code == 0, out + err[-5000:]
                assert out.split()[-1] == "done"

    @pytest.mark.slow
    def test_one_does_not_connect(self):
        with processes("missing", "3", count=3, ranks=(0, 2)) as children:
            for child in children:
                code, _, err = child.finish(60)
                assert code == 1, err
                assert re.search(r"TimeoutError: .* for 3 processes, and process 1 did not connect", err), err

    @pytest.mark.slow
    def test_an_exception_ends_a_process_at_once(self):
        """Without waiting for the other one, as JAX would have it."""
        with processes("error", "60") as children:
            code, out, err = children[1].finish(30)
            assert code == 1
            assert out == "about to fail"
            assert "ArithmeticError: one of us" in err
            assert children[0].process.poll() is None

    def test_jax_was_used_before(self):
        with processes("late") as children:
            for child in children:
                code, _, err = child.finish(60)
                assert code == 1
                assert "RuntimeError" in err.splitlines()[-1], err


class TestAlone:
    def test_nothing_happens(self):
        for arguments in [{}, {"num_processes": 1}, {"num_processes": 1, "process_id": 0, "coordinator": "a:1"}]:
            assert ee.distributed.initialise(**arguments) == (0, 1)
        assert not jax.distributed.is_initialized()
        assert ee.distributed.is_first()
        ee.distributed.shutdown()

    def test_fetch(self):
        keys = jax.random.split(jax.random.key(0), 2)
        tree = {"x": jnp.arange(3.0), "keys": keys, "rest": ("a", jnp.sin, 1)}
        got = ee.distributed.to_host(tree)
        assert isinstance(got["x"], np.ndarray)
        np.testing.assert_array_equal(got["keys"], jax.random.key_data(keys))
        assert got["rest"] == tree["rest"]

    @pytest.mark.parametrize("value", [True, False, -(2**63), 0.1, np.int8(3), np.float64(0.1), jnp.float32(2)])
    def test_agreed(self, value):
        got = ee.distributed.broadcast_from_first(value)
        assert got == (value if isinstance(value, bool | int | float) else value.item())
        assert type(got) in (bool, int, float)


def outcomes(calls):
    """What becomes of processes that call the roll, each of them here a thread."""
    found = [None] * len(calls)

    def one(i):
        try:
            wait_for_all(calls[i])
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def calls(count, ranks, *, timeout=10.0, host="127.0.0.1"):
    port = free_port()
    return [Rendezvous(host, port, count, rank, timeout) for rank in ranks]


# JSON, but not messages of these processes; where they are sent, a few represent all.
WRONG_LINES = [b'{"process": [1e999, 2]}', b'{"missing": 5, "over": true}']
MORE_WRONG_LINES = [
    b"1e999",
    b"null",
    b'"refused"',
    b'{"process": "ab"}',
    b'{"process": [1]}',
    b'{"process": [1, 2, 3]}',
    b'{"process": [true, 2]}',
    b'{"process": [1.0, 2]}',
    b'{"process": [NaN, 2]}',
    b'{"process": [' + b"9" * 5000 + b", 2]}",
    b'{"process": null}',
    b'{"refused": ["a"]}',
    b'{"missing": [1]}',
    b'{"missing": 5}',
    b'{"missing": [1, "a"], "over": true}',
    b'{"missing": [true], "over": true}',
    b'{"missing": [1], "over": 1}',
    b'{"missing": {}, "over": false}',
    b"[" * 10**5,
    b"\xff",
    b"",
]


def test_lines_without_information():
    for line in WRONG_LINES + MORE_WRONG_LINES:
        assert _rendezvous._message(line) is None, line
    for said in [b'{"process": [1, 2]}', b'{"refused": "a"}', b'{"missing": [], "over": true}']:
        assert _rendezvous._message(said) is not None


class TestRendezvous:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
    def test_all_connect(self, host):
        if host == "::1" and not socket.has_ipv6:
            pytest.skip("needs IPv6")
        these = calls(5, range(5), host=host)
        assert outcomes(these) == [None] * 5
        socket.create_server(("127.0.0.1", these[0].port)).close()  # the port is free again

    def test_missing_processes(self):
        start = time.monotonic()
        found = outcomes(calls(5, [0, 2, 4], timeout=1.0))
        assert time.monotonic() - start < 5
        for error in found:
            assert isinstance(error, TimeoutError)
            assert "for 5 processes, and processes 1 and 3 did not connect" in str(error)

    def test_missing_first_process(self):
        (error,) = outcomes(calls(2, [1], timeout=0.5))
        assert re.search(
            r"process 1 looked for process 0 at 127.0.0.1:\d+ for 0.5 s, and there was no answer", str(error)
        )

    def test_late_ones_are_waited_for(self):
        first, other = calls(2, [0, 1])
        found = []
        thread = threading.Thread(target=lambda: found.append(outcomes([other])))
        thread.start()
        time.sleep(0.5)
        assert outcomes([first]) == [None]
        thread.join()
        assert found == [[None]]

    def test_two_of_one_number(self):
        first, one, two = calls(3, [0, 1, 1], timeout=2.0)
        _, *both = outcomes([first, one, two])
        assert sum("process 1 is already connected" in str(error) for error in both) == 1
        assert sum("process 2 did not connect" in str(error) for error in both) == 1

    def test_other_counts(self):
        first, other = calls(2, [0, 1], timeout=1.0)
        found = outcomes([first, other._replace(num_processes=3)])
        assert "process 1 did not connect" in str(found[0])
        assert "it waits for 2 processes, and this one for 3" in str(found[1])

    @pytest.mark.parametrize(
        "said", [b"", b"GET / HTTP/1.1\n", b"[1]\n", b"x" * 10**4, b"[" * 199, *(line + b"\n" for line in WRONG_LINES)]
    )
    def test_other_clients_are_ignored(self, said):
        first, other = calls(2, [0, 1])
        thread = threading.Thread(target=lambda: outcomes([first]))
        thread.start()
        with self._connected(first.port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
            assert outcomes([other]) == [None]
        thread.join()

    @pytest.mark.parametrize(
        "said", [b"", b"HTTP/1.1 400 Bad Request\n\n", b"[]\n", b"\xff\n", *(line + b"\n" for line in WRONG_LINES)]
    )
    def test_other_servers(self, said):
        (other,) = calls(2, [1], timeout=1.0)
        with socket.create_server(("127.0.0.1", other.port)) as stranger:

            def answer():
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = stranger.accept()
                        connection.recv(1000)  # closing with unread bytes would reset the connection
                        connection.sendall(said)
                        connection.close()

            thread = threading.Thread(target=answer)
            thread.start()
            (error,) = outcomes([other])
            stranger.shutdown(socket.SHUT_RDWR)
            thread.join()
        assert "another program answered" in str(error)

    def test_the_address_is_taken(self):
        (first,) = calls(2, [0])
        with socket.create_server(("127.0.0.1", first.port)):
            (error,) = outcomes([first])
        assert isinstance(error, OSError)
        assert f"cannot listen at 127.0.0.1:{first.port} as process 0" in str(error)
        assert "Another program listens there" in str(error)

    def test_it_listens_on_this_machine_only(self, monkeypatch):
        assert _rendezvous.bind_address("127.0.0.1", 1) == "127.0.0.1:1"
        assert _rendezvous.bind_address("::1", 1) == "[::1]:1"
        assert _rendezvous.bind_address("node-0", 1) == "[::]:1"
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:2")
        assert _rendezvous.bind_address("127.0.0.1", 1) == "10.0.0.1:2"

    @staticmethod
    def _connected(port):
        for _ in range(100):
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port))
            time.sleep(0.05)
        raise AssertionError("no process listens")


LAUNCHED = dict(zip(OURS, ["127.0.0.1:5", "4", "3"], strict=True))
TORCHRUN = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
FOUND = {
    "nobody": ({}, Settings()),
    "the launcher": (LAUNCHED, Settings("127.0.0.1:5", 4, 3)),
    "torchrun": (TORCHRUN, Settings("node-0:29500", 2, 1)),
    "a local rank": (TORCHRUN | {"LOCAL_RANK": "1"}, Settings("node-0:29500", 2, 1, [1])),
    "torchrun's own store": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        Settings("node-0:29501", 2, 1),
    ),
    "IPv6": (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, Settings("[fd00::1]:29500", 2, 1)),
    "the launcher inside of another": (SLURM | TORCHRUN | LAUNCHED, Settings("127.0.0.1:5", 4, 3)),
    "Slurm": (SLURM, Settings()),  # JAX reads its variables
    "Slurm and half of PyTorch's": (SLURM | {"MASTER_ADDR": "x", "WORLD_SIZE": "8"}, Settings()),
    "Slurm and a coordinator": (SLURM | {"JAX_COORDINATOR_ADDRESS": "b:1"}, Settings("b:1")),
    "PyTorch's for one": ({"WORLD_SIZE": "1", "RANK": "0"}, Settings()),
}


class TestSettings:
    @pytest.mark.parametrize("name", FOUND)
    def test_found(self, name, monkeypatch):
        variables, place = FOUND[name]
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        assert find_settings(Settings()) == place

    def test_arguments_take_precedence(self, monkeypatch):
        for variable, value in LAUNCHED.items():
            monkeypatch.setenv(variable, value)
        assert find_settings(Settings(process_id=1)) == Settings("127.0.0.1:5", 4, 1)
        assert find_settings(Settings(num_processes=1)).num_processes == 1

    @pytest.mark.parametrize("name", CLUSTERS)
    def test_detection_that_fails(self, monkeypatch, name):
        """In a cluster a process is not taken for a single one, as it would be elsewhere."""

        def fail(*args, **options):
            raise KeyError("job-name")

        monkeypatch.setattr(jax.distributed, "initialize", fail)
        assert ee.distributed.initialise() == (0, 1)
        monkeypatch.setenv(name, "somewhere")
        with pytest.raises(
            RuntimeError, match="(?s)KeyError: 'job-name'\nCall it .* single process, `num_processes=1`"
        ):
            ee.distributed.initialise()
        assert ee.distributed.initialise(num_processes=1) == (0, 1)

    def test_what_is_missing_is_left_to_jax(self, monkeypatch):
        calls = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
        for variable, value in (SLURM | {"JAX_COORDINATOR_ADDRESS": "b:1"}).items():
            monkeypatch.setenv(variable, value)
        assert ee.distributed.initialise(timeout=2.5, heartbeat=7) == (0, 1)
        timeouts = {"initialization_timeout": 3, "heartbeat_timeout_seconds": 7}
        assert calls == [(("b:1", None, None), timeouts)]


START = ee.distributed.initialise
BAD = {
    "no port": (
        lambda: START("node-0", 2, 0),
        ValueError,
        "`distributed.initialise` needs `coordinator` as `'host:port'`, got ",
    ),
    "no host": (lambda: START(":1234", 2, 0), ValueError, "as `'host:port'`, got ':1234'.\nIt is where process 0 runs"),
    "a bare IPv6 address": (lambda: START("fd00::1:12", 2, 0), ValueError, "`'[fd00::1]:12345'`"),
    "a port too large": (lambda: START("a:70000", 2, 0), ValueError, "needs a port from 1 to 65535 in `coordinator`"),
    "a number as address": (lambda: START(1234, 2, 0), TypeError, "needs `coordinator` as text, got 1234"),
    "a process too many": (
        lambda: START("a:1", 2, 2),
        ValueError,
        "`distributed.initialise` needs `process_id` to be below `num_processes`: got process 2 of 2.\n"
        "Processes are counted from 0.",
    ),
    "a negative process": (lambda: START("a:1", 2, -1), ValueError, "needs `process_id` of at least 0, got -1."),
    "no process": (lambda: START("a:1", 0, 0), ValueError, "needs `num_processes` of at least 1, got 0."),
    "half a process": (lambda: START("a:1", 2.5, 0), TypeError, "needs an integer `num_processes`, got 2.5."),
    "no time": (lambda: START(timeout=0), ValueError, "needs a positive number of seconds as `timeout`, got 0."),
    "for ever": (lambda: START(timeout=float("inf")), ValueError, "positive number of seconds as `timeout`, got inf"),
    "a text as time": (
        lambda: START(heartbeat="5s"),
        TypeError,
        "`distributed.initialise` needs `heartbeat` in seconds, got '5s'",
    ),
    "half of what is needed": (
        lambda: START(num_processes=2),
        ValueError,
        "`distributed.initialise` needs `coordinator` and `process_id` for several processes.\n"
        "Pass it, or start the processes with `python -m eqx_ensemble.launch`, Slurm or the like.",
    ),
    "a traced array": (
        lambda: jax.jit(lambda x: ee.distributed.to_host({"a": x}))(1.0),
        TypeError,
        "`distributed.to_host` copies arrays to the host, and the leaf at `['a']` is traced: call it outside `jax.jit`",
    ),
    "a decision that is a text": (
        lambda: ee.distributed.broadcast_from_first("yes"),
        TypeError,
        "`distributed.broadcast_from_first` needs a bool, an int of at most 64 bits or a float in process 0, got a "
        "str.\nEncode it as a number.",
    ),
    "a decision too large": (
        lambda: ee.distributed.broadcast_from_first(2**63),
        TypeError,
        "in process 0, got an int.",
    ),
    "two decisions": (
        lambda: ee.distributed.broadcast_from_first(np.ones(2)),
        TypeError,
        "in process 0, got a ndarray.",
    ),
}
BAD_VARIABLES = {
    "a port that is a word": (
        TORCHRUN | {"MASTER_PORT": "ssh"},
        "in the environment variable `MASTER_PORT`, got 'ssh'",
    ),
    "a rank too large": (TORCHRUN | {"RANK": "2"}, "got process 2 of 2"),
    "no rank": (
        {"MASTER_ADDR": "a", "WORLD_SIZE": "2"},
        "needs `coordinator`, `num_processes` and `process_id` for several processes.\nPass it, or start the "
        "processes with `python -m eqx_ensemble.launch`, Slurm or the like.\nThe environment variables `MASTER_PORT` "
        "and `RANK` are not set; with the others they would define it.",
    ),
    "a coordinator alone": ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "needs `num_processes` and `process_id` for"),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.parametrize("name", BAD_VARIABLES)
def test_message_of_variables(monkeypatch, name):
    variables, text = BAD_VARIABLES[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(text)):
        START()


def test_jax_was_initialised_otherwise(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert START() == (0, 1)
    with pytest.raises(RuntimeError, match="`jax.distributed.initialize` was called before in this process"):
        START("a:1", 2, 0)
    assert _initialise._started == []


def test_many_missing_are_not_all_listed():
    words = missing_message(range(1, 101), 128, "a:1", 2.5)
    assert "waited 2.5 s at a:1 for 128 processes, and processes 1, 2, 3, 4, 5, 6, 7, 8 and 92 more did not" in words
