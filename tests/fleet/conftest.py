import pytest

import eqx_ensemble as ee


@pytest.fixture(scope="session")
def whole_run():
    """The run of one process."""
    from .test_fit import fit
    from .test_save import PLAIN

    return fit(ee.fit, PLAIN)


@pytest.fixture(scope="session")
def sharded_run(tmp_path_factory):
    """The same run over shards, in files."""
    from .test_save import save

    return save(tmp_path_factory.mktemp("fleet") / "run")
