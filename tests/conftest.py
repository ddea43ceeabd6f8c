import contextlib
import ctypes
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

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


_MOST_BYTES = 1.1e9  # of a process; compiled programs are most of them
_tests = itertools.count(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keeps the tests of a file in one process, because they share compiled programs; the longest files come first."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by numbers of tests
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items):
    first = ("test_notebooks.py", "test_docs.py", "test_boundary.py", "test_benchmarks.py", "test_downstream.py")
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


def pytest_collection():
    """What is imported and collected stays."""
    gc.disable()


def pytest_collection_finish():
    """Looks for garbage less often, and not among what was imported: a tenth of the time of tests that compile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs after the tests of a file, and where they take too much memory."""
    is_last = nextitem is None or nextitem.path != item.path
    memory = pathlib.Path("/proc/self/statm")
    if not is_last and next(_tests) % 10 == 0 and memory.exists():
        is_last = int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > _MOST_BYTES
    if is_last:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # of other systems
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc would keep most of what is free


def pytest_runtest_logreport(report):
    """Says at once what failed, not only at the end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(f"\nFAILED {report.nodeid}: {crash.message.splitlines()[0] if crash else report.when}", flush=True)


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
