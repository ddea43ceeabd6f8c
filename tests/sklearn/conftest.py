"""One small data set and one small network, so that tests share their compiled programs."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

ROWS, FEATURES = 24, 3


@pytest.fixture(scope="session")
def x():
    return np.random.default_rng(0).normal(3, 2, size=(ROWS, FEATURES))


@pytest.fixture(scope="session")
def y(x):
    return 100 + 10 * np.sin(x[:, 0]) + np.random.default_rng(1).normal(size=ROWS)


@pytest.fixture(scope="session")
def labels(x):
    return np.array(["low", "middle", "high"])[np.digitize(x[:, 0], [2.0, 4.0])]


@pytest.fixture(scope="session")
def small():
    """Parameters of both estimators."""
    return {"num_members": 2, "hidden_layer_sizes": (4,), "learning_rate": 0.05, "max_iter": 3} | {
        "early_stopping": False,
        "random_state": 0,
    }
