import importlib.metadata
import os

from ._warnings import warn

# The compiler of 0.10.2 passes such sums to a library that reads the wrong rows; this flag disables that.
_SAFE = "--xla_cpu_experimental_ynn_fusion_type=-reduce"
_FAULTS = {
    "0.10.2": "jaxlib 0.10.2 silently computes some sums over more than some 16,000 rows wrongly on CPUs: a "
    "loss, a gradient or a score may be wrong (https://github.com/jax-ml/jax/issues/39103).\n"
    f"Install jaxlib 0.10.1 or 0.11.1 and later, or set `XLA_FLAGS={_SAFE}` before Python starts.",
    "0.11.0": "jaxlib 0.11.0 ends Python with a segmentation fault at some sums of products of arrays with many axes, "
    "on CPUs (https://github.com/jax-ml/jax/issues/39257).\nInstall jaxlib 0.10.1 or 0.11.1 and later.",
}


def warn_of_jaxlib() -> None:
    """Warns about releases of jaxlib that compute wrongly or crash on CPUs, unless the user has set the flag."""
    release = importlib.metadata.version("jaxlib")
    is_safe = release == "0.10.2" and "xla_cpu_experimental_ynn_fusion_type" in os.environ.get("XLA_FLAGS", "")
    if release in _FAULTS and not is_safe:
        warn(_FAULTS[release], RuntimeWarning)
