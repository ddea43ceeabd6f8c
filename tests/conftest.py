import contextlib
import gc
import importlib.metadata
import itertools
import logging
import os
import pathlib
import re
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests compile much more than they run. CI repeats those that compare bits as users run them, with `XLA_FLAGS=`.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]  # parts that threads compile cost more than they gain
_FLAGS += [f"--xla_llvm_enable_{kind}_metadata=false" for kind in ("alias_scope", "noalias", "invariant_load")]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):  # newer ones do not have it
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import config as jaxtyping_config  # noqa: E402

from .scheduling import make_scheduler  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def listed_marks():
    """The marks of `marks.txt`, by test."""
    lines = pathlib.Path(__file__).with_name("marks.txt").read_text().splitlines()
    marks = [line.split(" ", 1) for line in lines if not line.startswith("#")]
    return {nodeid: mark for mark, nodeid in marks}


_MARKS = listed_marks()
_MOST_MAPPINGS = 30_000  # Linux allows a process 65,530; every compiled program takes some, and one too many is a crash
_TESTS_BETWEEN_LOOKS = 25
_tests = itertools.count(1)
COLLECTED = pytest.StashKey[list[str]]()  # before marks are selected


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return make_scheduler(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_addoption(parser):
    parser.addoption("--turn", metavar="K/N", help="of the slow tests, the K-th and every N-th after it")


def in_turn(items, turn):
    """Whether each test runs in a turn: all that are not slow, and every `N`-th of those that are."""
    index, count = map(int, turn.split("/"))
    slow = itertools.count(1)
    return [
        "slow" not in {mark.name for mark in item.iter_markers()} or next(slow) % count == index % count
        for item in items
    ]


def pytest_collection():
    """What is imported and collected stays."""
    gc.disable()


def pytest_collection_finish():
    """Looks for garbage less often, and not among what was imported: a tenth of the time of tests that compile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Replaces the marks of tests in `marks.txt` before marks are selected; keeps what was collected."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    for item in items:
        mark = _MARKS.get(item.nodeid) or _MARKS.get(item.nodeid.partition("[")[0])
        if mark is not None:
            item.own_markers[:] = [own for own in item.own_markers if own.name not in ("slow", "exhaustive")]
        if mark in ("slow", "exhaustive"):
            item.add_marker(mark)
    if turn := config.getoption("turn"):
        kept = in_turn(items, turn)
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
        items[:] = itertools.compress(items, kept)


def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs after the tests of a file, which would take gigabytes, and where there are too many."""
    is_last = nextitem is None or nextitem.path != item.path
    mappings = pathlib.Path("/proc/self/maps")
    if not is_last and next(_tests) % _TESTS_BETWEEN_LOOKS == 0 and mappings.exists():
        is_last = mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS
    if is_last:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unhooked():
    """Switch off jaxtyping and beartype, as for users, so that the library's own messages are seen."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.fixture
def compiled(caplog):
    """A context that gives the names of the programs that jax compiles inside it, complete when it ends."""

    @contextlib.contextmanager
    def watched():
        names = []
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
            yield names
        found = (re.search(r"Compiling jit\((.*?)\)", record.getMessage()) for record in caplog.records)
        names += [match[1] for match in found if match]

    return watched


@pytest.fixture
def interruptible():
    """Ctrl-C raises `KeyboardInterrupt`, as in a shell, whatever the test runner made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
