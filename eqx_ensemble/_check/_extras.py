import importlib.util


def missing_extra(what: str, package: str, extra: str) -> str:
    """The message that names the extra to install."""
    return f"`{what}` needs {package}.\nInstall it: `pip install 'eqx_ensemble[{extra}]'`."


def installed(package: str, *, what: str, extra: str) -> None:
    """A package that is needed only for `what` is there."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(missing_extra(what, package, extra))
