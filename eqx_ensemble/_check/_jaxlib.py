import importlib.metadata
import os
import warnings

# Its CPU compiler hands such sums to a library that then reads the wrong rows; this keeps them out of its hands.
_SAFE = "--xla_cpu_experimental_ynn_fusion_type=-reduce"


def sums_are_right() -> None:
    """Warn where jaxlib is the release that sums large arrays wrongly on CPUs, unless the user took precautions."""
    told = "xla_cpu_experimental_ynn_fusion_type" in os.environ.get("XLA_FLAGS", "")
    if told or importlib.metadata.version("jaxlib") != "0.10.2":
        return
    warnings.warn(
        "jaxlib 0.10.2 computes some sums over more than some 16,000 rows wrongly on CPUs, and says nothing: a loss, a "
        "gradient or a score may be wrong (https://github.com/jax-ml/jax/issues/39103).\n"
        f"Install jaxlib 0.10.1 or a later one than 0.10.2, or set `XLA_FLAGS={_SAFE}` before Python starts.",
        RuntimeWarning,
        stacklevel=3,
    )
