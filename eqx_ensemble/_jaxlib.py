import importlib.metadata

from ._warnings import warn

_WAITS = "can hang in linear algebra on many matrices"
_FAULTS = {  # on CPUs
    "0.10.0": _WAITS,
    "0.10.1": _WAITS,
    "0.10.2": "silently computes some sums wrongly (https://github.com/jax-ml/jax/issues/39103)",
    "0.11.0": "ends Python with a segmentation fault (https://github.com/jax-ml/jax/issues/39257)",
    "0.11.1": "may hang in Fourier transforms",
}


def warn_of_jaxlib() -> None:
    """Warns about releases of jaxlib with such a fault."""
    release = importlib.metadata.version("jaxlib")
    if release in _FAULTS:
        hint = "Install jaxlib 0.9.2, or 0.11.2 and later."
        warn(f"On CPUs jaxlib {release} {_FAULTS[release]}.\n{hint}", RuntimeWarning)
