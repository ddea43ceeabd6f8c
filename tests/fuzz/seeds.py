"""Seeds of random tests: a few, or as many as a time budget allows."""

import itertools
import os
import time


def seeds(default=3):
    """Yields seeds from `EQX_ENSEMBLE_FUZZ_SEED` on, 0 if not set.

    `default` of them, or those that start within `EQX_ENSEMBLE_FUZZ_SECONDS`, which each test has for itself.
    """
    first = int(os.environ.get("EQX_ENSEMBLE_FUZZ_SEED", 0))
    seconds = os.environ.get("EQX_ENSEMBLE_FUZZ_SECONDS")
    if seconds is None:
        yield from range(first, first + default)
        return
    end = time.monotonic() + float(seconds)
    for seed in itertools.count(first):
        if time.monotonic() >= end:
            return
        yield seed
