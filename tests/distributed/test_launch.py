"""`python -m eqx_ensemble.launch`: what it starts, shows, and ends."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from eqx_ensemble import launch
from eqx_ensemble.distributed._environment import OURS
from eqx_ensemble.launch._check import exit_message
from eqx_ensemble.launch._main import environment_of

HERE = pathlib.Path(__file__).parent
TOGETHER = str(HERE / "together.py")


@pytest.fixture
def script(tmp_path):
    """Writes a script, which need not import JAX, and returns its path."""

    def written(text):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return written


def start(*arguments, **options):
    """The command itself, which first imports the library."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, "-m", "eqx_ensemble.launch", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs the command in this process, and gives its exit code and what was written."""
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS", *OURS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))

    def finished(*arguments):
        return launch.main(arguments), *capfd.readouterr()

    return finished


@contextlib.contextmanager
def signals(folder, *steps):
    """Sends this process a signal whenever so many files of a name are there."""

    def send():
        for name, count, number in steps:
            while len(list(folder.glob(f"{name}-*"))) < count:
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join(10)


def by_process(lines, number):
    return [line.removeprefix(f"[{number}] ") for line in lines.splitlines() if line.startswith(f"[{number}] ")]


def test_one_program_in_two_processes(run):
    code, out, err = run("-n", "2", "--devices", "2", TOGETHER, "everything")
    assert code == 0, out + err
    for number in range(2):
        assert by_process(out, number)[-1] == "done"


def test_output_and_surroundings(script, run):
    path = script("""
        import os, sys
        print(*sys.argv[1:], os.environ["JAX_NUM_CPU_DEVICES"], os.environ["JAX_PLATFORMS"])
        print("warn", file=sys.stderr)
        print(os.environ["EQX_ENSEMBLE_PROCESS_ID"], os.environ["EQX_ENSEMBLE_COORDINATOR"], end="")
        assert sys.stdin.read() == ""
    """)
    code, out, err = run("-n", "3", "--devices", "4", path, "a", "-n", "--devices")
    assert code == 0, err
    addresses = set()
    for number in range(3):
        first, last = by_process(out, number)
        assert first == "a -n --devices 4 cpu"
        assert by_process(err, number) == ["warn"]
        assert last.split()[0] == str(number)
        addresses.add(last.split()[1])
    assert re.fullmatch(r"127\.0\.0\.1:\d+", addresses.pop())
    assert not addresses


def test_a_module(script, run, monkeypatch):
    path = pathlib.Path(script("import sys\nprint(__name__, sys.argv[1:])"))
    monkeypatch.chdir(path.parent)
    code, out, err = run("-n", "2", "-m", "script", "-m")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] __main__ ['-m']", "[1] __main__ ['-m']"]


FAILING = """
    import os, signal, subprocess, sys, time
    if os.environ["EQX_ENSEMBLE_PROCESS_ID"] == "1":
        {how}
    signal.signal(signal.SIGTERM, {deaf})
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({note!r}, "a").write(f"{{os.getpid()}} {{child.pid}} ")
    time.sleep(60)
"""
TIDY, DEAF = "lambda *_: sys.exit(print('tidy'))", "signal.SIG_IGN"
ENDS = {
    "exits": ("sys.exit(3)", TIDY, 3, "failed with exit code 3"),
    "raises": ("raise ArithmeticError('mine')", TIDY, 1, "failed with exit code 1"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", TIDY, 137, "was ended by SIGKILL"),
    "is killed, the others are deaf": ("os.kill(os.getpid(), signal.SIGKILL)", DEAF, 137, "was ended by SIGKILL"),
}


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("name", ENDS)
def test_one_that_fails_ends_all(script, run, tmp_path, name):
    how, deaf, expected, said = ENDS[name]
    note = tmp_path / "pids"
    late = f"while open({str(note)!r}, 'a+').seek(0, 2) < 1: time.sleep(0.02)\n        time.sleep(0.3); {how}"
    path = script(FAILING.format(how=late, deaf=deaf, note=str(note)))
    begin = time.monotonic()
    code, out, err = run("-n", "2", "--grace", "1", path)
    assert time.monotonic() - begin < 30
    assert code == expected
    assert f"eqx_ensemble.launch: process 1 {said}; ending the other process." in err.splitlines()
    assert by_process(out, 0) == ([] if deaf is DEAF else ["tidy"])
    if "raises" in name:
        assert by_process(err, 1)[-1] == "ArithmeticError: mine"
    if pathlib.Path("/proc/self").exists():
        time.sleep(0.2)
        assert [pid for pid in note.read_text().split() if is_running(pid)] == []


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [[], ["deaf"]], ids=["", "deaf"])
def test_one_of_jax_that_is_killed(run, deaf):
    """JAX takes SIGTERM for the notice of a preemption, which ends nothing."""
    begin = time.monotonic()
    code, _, err = run("-n", "2", "--devices", "1", "--grace", "1", TOGETHER, "killed", "100", *deaf)
    assert code == 137
    assert "process 1 was ended by SIGKILL; ending the other process." in err
    assert time.monotonic() - begin < 60


INTERRUPTED = """
    import os, pathlib, signal, time
    folder, number = pathlib.Path({folder!r}), os.environ["EQX_ENSEMBLE_PROCESS_ID"]
    try:
        (folder / f"ready-{{number}}").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
        (folder / f"interrupted-{{number}}").touch()
        {then}
"""


def test_ctrl_c_is_passed_on_and_waited_for(script, run, tmp_path, interruptible):
    """As long as the processes need."""
    path = script(INTERRUPTED.format(folder=str(tmp_path), then="time.sleep(1); print('saved')"))
    with signals(tmp_path, ("ready", 2, signal.SIGINT)):
        code, out, err = run("-n", "2", "--grace", "0.1", path)
    assert (code, err) == (130, "")
    for number in range(2):
        assert by_process(out, number) == ["interrupted", "saved"]


def test_the_second_ctrl_c_ends_them(script, run, tmp_path, interruptible):
    path = script(
        INTERRUPTED.format(folder=str(tmp_path), then="signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    )
    begin = time.monotonic()
    with signals(tmp_path, ("ready", 2, signal.SIGINT), ("interrupted", 2, signal.SIGINT)):
        code, _, _ = run("-n", "2", "--grace", "0.5", path)
    assert code == 130
    assert time.monotonic() - begin < 20


def test_a_signal_ends_all(script, run, tmp_path):
    path = script(INTERRUPTED.format(folder=str(tmp_path), then="pass"))
    with signals(tmp_path, ("ready", 2, signal.SIGTERM)):
        code, out, _ = run("-n", "2", path)
    assert (code, out) == (143, "")


def test_a_signal_while_processes_are_started(script, run, tmp_path, monkeypatch):
    """One is there, the others are not yet: none is left, and the signal counts."""
    path = script(f"""
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, f"pid-{{os.getpid()}}").touch()
        time.sleep(60)
    """)
    started, popen = [], subprocess.Popen

    def interrupted(*arguments, **options):
        started.append(popen(*arguments, **options))
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(99)))  # of the caller
    try:
        code, _, _ = run("-n", "2", "--grace", "1", path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 143
    assert [child.poll() for child in started] == [-signal.SIGTERM] * 2


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="needs /proc")
def test_what_a_process_has_left_ends_too(script, run, tmp_path):
    path = script(f"""
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pids")!r}, "a").write(f"{{child.pid}} ")
        os._exit(0)
    """)
    begin = time.monotonic()
    code, _, err = run("-n", "2", path)
    assert (code, err) == (0, "")
    assert time.monotonic() - begin < 20
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    time.sleep(0.2)
    assert [pid for pid in pids if is_running(pid)] == []


def test_lines(script, run):
    """Of one that is overwritten, the last state; the last one may lack its end."""
    path = script("""
        import sys, time
        sys.stderr.write("windows\\r\\n")
        for i in range(5):
            sys.stderr.write(f"\\r{i} of 4")
            sys.stderr.flush()
            time.sleep(0.02)
        sys.stderr.write("\\n" + "x" * 200_000)
    """)
    code, _, err = run("-n", "2", path)
    assert code == 0
    for number in range(2):
        assert by_process(err, number) == ["windows", "4 of 4", "x" * 200_000]


@pytest.mark.slow
def test_much_output_without_reader(script):
    """More than all pipes hold, on both streams: the processes wait, and nothing is lost."""
    path = script("""
        import sys
        for i in range(3000):
            print(i, "o" * 50)
            print(i, "e" * 50, file=sys.stderr)
    """)
    with start("-n", "2", path) as launcher:
        time.sleep(8)
        assert launcher.poll() is None
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    for number in range(2):
        assert by_process(out, number) == [f"{i} {'o' * 50}" for i in range(3000)]
        assert by_process(err, number) == [f"{i} {'e' * 50}" for i in range(3000)]


def test_last_lines_are_read_late(script):
    """What has been printed when all have ended is waited for as well."""
    path = script("""
        import os
        print("x" * 50_000)
        open(os.environ["EQX_ENSEMBLE_PROCESS_ID"], "w")
    """)
    folder = pathlib.Path(path).parent
    with start("-n", "3", path, cwd=folder) as launcher:
        while not all((folder / str(number)).exists() for number in range(3)):
            assert launcher.poll() is None
            time.sleep(0.02)
        time.sleep(4)
        out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{number}] " + "x" * 50_000 for number in range(3)]


@pytest.mark.slow
def test_output_without_reader(script):
    path = script("import time\nwhile True: print('x' * 1000); time.sleep(0.01)")
    with start("-n", "2", path) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        begin = time.monotonic()
        assert launcher.wait(timeout=60) == 141
        assert time.monotonic() - begin < 20
        assert "Traceback" not in launcher.stderr.read()


@pytest.mark.slow
def test_one_process_is_a_plain_one(script):
    path = script("""
        import os, sys
        print(sys.stdin.read(), *(name for name in os.environ if name.startswith("EQX_ENSEMBLE")))
        sys.exit(4)
    """)
    with start("-n", "1", path, stdin=subprocess.PIPE) as launcher:
        out, err = launcher.communicate("typed", timeout=60)
    assert (launcher.returncode, out.split(), err) == (4, ["typed"], "")


BAD = {
    "no count": ([TOGETHER], "the following arguments are required: -n/--processes"),
    "no process": (["-n", "0", TOGETHER], "error: -n needs at least 1 process, got 0"),
    "no device": (["-n", "2", "--devices", "0", TOGETHER], "error: --devices needs at least 1, got 0"),
    "no grace": (["-n", "2", "--grace", "nan", TOGETHER], "error: --grace needs a number of seconds, got nan"),
    "no script": (["-n", "2", "nothing.py"], "error: there is no file 'nothing.py'; a module is run by `-m`"),
    "no program": (["-n", "2"], "the following arguments are required: PROGRAM"),
}


@pytest.mark.parametrize("name", BAD)
def test_message(name, capsys):
    arguments, text = BAD[name]
    with pytest.raises(SystemExit) as stopped:
        launch.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "others", "text"),
    [
        (-9, 3, "process 2 was ended by SIGKILL; ending the 3 other processes."),
        (-250, 1, "process 2 was ended by signal 250; ending the other process."),
        (1, 0, "process 2 failed with exit code 1."),
    ],
)
def test_how_a_process_ended(code, others, text):
    assert exit_message(2, code, others=others) == f"eqx_ensemble.launch: {text}"


def test_where_there_are_no_process_groups(monkeypatch):
    monkeypatch.delattr(os, "killpg")
    with pytest.raises(NotImplementedError, match="ends processes in groups, which this system does not have"):
        launch.main(["-n", "2", TOGETHER])


def test_devices_of_others_are_left_alone(monkeypatch):
    for name in ("JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    one = environment_of(1, processes=2, devices=None, port=5)
    assert one["JAX_LOCAL_DEVICE_IDS"] == "1"
    assert "JAX_PLATFORMS" not in one
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    assert environment_of(1, processes=2, devices=None, port=5)["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert environment_of(0, processes=1, devices=None, port=5) == dict(os.environ)
