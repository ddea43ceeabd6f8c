import contextlib
import gc
import importlib.metadata
import itertools
import logging
import os
import pathlib
import re
import signal
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests compile much more than they run. CI repeats those that compare bits as users run them, with `XLA_FLAGS=`.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]  # parts that threads compile cost more than they gain
_FLAGS += [f"--xla_llvm_enable_{kind}_metadata=false" for kind in ("alias_scope", "noalias", "invariant_load")]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 12):  # newer ones do not have it
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import config as jaxtyping_config  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_LISTED_AS_SLOW = pathlib.Path(__file__).with_name("slow.txt").read_text().splitlines()
_MOST_MAPPINGS = 30_000  # Linux allows a process 65,530; every compiled program takes some, and one too many is a crash
_TESTS_BETWEEN_LOOKS = 25
_tests = itertools.count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks those of `slow.txt` before marks are selected."""
    listed = {line for line in _LISTED_AS_SLOW if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")


def pytest_runtest_teardown():
    """Drops compiled programs before a long-lived process has too many."""
    mappings = pathlib.Path("/proc/self/maps")
    if next(_tests) % _TESTS_BETWEEN_LOOKS == 0 and mappings.exists():
        if mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()


@pytest.fixture(autouse=True)
def forget_paces():
    """Every run begins with short chunks, whichever ran before."""
    pacing = sys.modules.get("eqx_ensemble.train.host._pacing")
    if pacing is not None:
        pacing._known.clear()


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
