import pytest

plt = pytest.importorskip("matplotlib.pyplot", reason="what plots are made with")


@pytest.fixture(autouse=True)
def closed():
    """No figure of one test is seen by another."""
    plt.close("all")
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]
