"""Random calls of the array functions, compared with SciPy, scikit-learn or NumPy in float64.

`EQX_ENSEMBLE_FUZZ_SECONDS=60` tries as many as a minute allows. A failure names the seed, which as
`EQX_ENSEMBLE_FUZZ_SEED` is the first one tried, and what was drawn.
"""

import warnings

import jax
import numpy as np
import pytest

from .calibration_cases import CALIBRATE
from .combination_cases import COMBINATIONS
from .conformal_cases import CONFORMAL
from .draws import Draw, check
from .score_cases import SCORES
from .seeds import seeds

ROOMS = {"scores": SCORES, "combine": COMBINATIONS, "conformal": CONFORMAL, "calibrate": CALIBRATE}


@pytest.mark.parametrize("room", ROOMS)
def test_random_calls(room):
    if room in ("scores", "calibrate"):
        pytest.importorskip("sklearn")
    names = list(ROOMS[room])
    for seed in seeds(6):
        name, x64 = names[seed % len(names)], bool(np.random.default_rng(seed).integers(3) == 0)
        with jax.enable_x64(x64), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw = Draw(seed, x64=x64)
            try:
                case = ROOMS[room][name](draw)
                if case is not None:
                    check(case, draw)
            except Exception as error:
                raise AssertionError(f"{room}.{name}, seed {seed}, x64={x64}: {draw.said}\n{error}") from error


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, cases in ROOMS.items() for name in cases])
def test_every_function(room, name):
    """With several shapes and kinds of weights each, some of them in double precision."""
    checked = 0
    for seed in range(20):  # some draws are of no case
        with jax.enable_x64(seed % 2 == 1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw = Draw(seed, x64=seed % 2 == 1)
            case = ROOMS[room][name](draw) if checked < 2 else None
            if case is not None:
                check(case, draw)
                checked += 1
