import importlib.metadata
import importlib.util
import re

_REASON = "in one environment, because jax2onnx needs `orbax-checkpoint` older than 0.11.37."
_CONFLICTS = {
    "onnx": f" It conflicts with the extra `orbax` {_REASON}",
    "orbax": f" It conflicts with the extra `onnx` {_REASON}",
}


def missing_extra_message(what: str, package: str, extra: str) -> str:
    """Names the extra to install, and extras that it conflicts with."""
    return f"`{what}` needs {package}.\nInstall it: `pip install 'eqx_ensemble[{extra}]'`.{_CONFLICTS.get(extra, '')}"


def check_installed(package: str, *, what: str, extra: str) -> None:
    """Raises `ImportError` unless an optional package, needed for `what`, is installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(missing_extra_message(what, package, extra))


def check_version(package: str, oldest: tuple[int, ...], *, what: str, extra: str) -> None:
    """Raises `ImportError` unless an installed package is recent enough."""
    found = importlib.metadata.version(package)
    if tuple(int(number) for number in re.findall(r"\d+", found)[: len(oldest)]) < oldest:
        raise ImportError(
            f"`{what}` needs {package} {'.'.join(map(str, oldest))} or newer, found {found}.\n"
            f"Update it: `pip install -U 'eqx_ensemble[{extra}]'`."
        )
