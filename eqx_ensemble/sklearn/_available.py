import importlib.util

from .._check import check_version, missing_extra_message

# The estimators inherit from scikit-learn's classes, so their import needs it.
if importlib.util.find_spec("sklearn") is None:
    raise ImportError(missing_extra_message("sklearn", "scikit-learn", "sklearn"))
check_version("scikit-learn", (1, 6), what="sklearn", extra="sklearn")
