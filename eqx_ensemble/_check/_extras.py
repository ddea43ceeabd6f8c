import importlib.util

_REASON = "in one environment, because jax2onnx needs `orbax-checkpoint` older than 0.11.37."
_CONFLICTS = {
    "onnx": f" It does not go with the extra `orbax` {_REASON}",
    "orbax": f" It does not go with the extra `onnx` {_REASON}",
}


def missing_extra(what: str, package: str, extra: str) -> str:
    """The message that names the extra to install, and what it does not go with."""
    return f"`{what}` needs {package}.\nInstall it: `pip install 'eqx_ensemble[{extra}]'`.{_CONFLICTS.get(extra, '')}"


def installed(package: str, *, what: str, extra: str) -> None:
    """A package that is needed only for `what` is there."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(missing_extra(what, package, extra))
