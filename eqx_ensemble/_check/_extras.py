def missing_extra(what: str, package: str, extra: str) -> str:
    """The message that names the extra to install."""
    return f"`{what}` needs {package}.\nInstall it: `pip install 'eqx_ensemble[{extra}]'`."
