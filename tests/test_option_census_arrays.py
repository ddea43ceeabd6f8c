"""Every argument of every public function of arrays is given bad values.

Each call gives a right result or an error that names the function: never an error from within JAX or NumPy, and never a
silent result of what cannot have been meant. What is right about those that give a result is said in `MEANT`.
"""

import inspect
import traceback
import warnings

import jax
import numpy as np
import pytest

from .array_calls import CALLS, NAMES, arguments_of, call
from .census import BAD_OF_ARRAYS

COUNTS = (
    "max_outcomes",
    "num_anchors",
    "num_axes",
    "num_bins",
    "num_classes",
    "num_draws",
    "num_folds",
    "num_groups",
    "num_members",
    "num_picks",
    "num_rows",
    "num_sets",
)
COUNTS += ("k", "num_levels", "num_samples", "num_free", "size", "window")

# What gives a result, by argument and value, and why that is right.
MEANT = {
    **{(name, "int64"): "NumPy's integers are counts" for name in COUNTS},
    ("size", "float32"): "half of the rows",
    **{("rate", kind): "a number above zero" for kind in ("int64", "float32")},
    ("risk", "float32"): "half of the largest loss",
    ("bound", "int64"): "NumPy's integers are losses",
    ("level", "float32"): "NumPy's floats are levels",
    ("levels", "float32"): "one level",
    ("levels", "0"): "the lowest value",
    **{(name, kind): "a value" for name in ("best", "optimum") for kind in ("-1", "0", "int64", "float32")},
    ("power", "0"): "a uniform draw",
    ("cut", "0"): "the mean",
    **{("lower", kind): "a threshold" for kind in ("-1", "0", "int64", "float32")},
    **{("upper", kind): "a threshold" for kind in ("inf", "-1", "0", "int64", "float32")},
    **{("order", kind): "a power above zero" for kind in ("int64", "float32")},
    **{(name, kind): "a number of zero or more"
       for name in ("beta", "bias_penalty", "coefficient", "floor", "kl_weight", "off_diagonal_penalty", "penalty",
                    "ridge", "smoothing", "step")
       for kind in ("0", "int64", "float32")},
    **{("tolerance", kind): "a number; it warns if it is missed" for kind in ("-1", "0", "int64", "float32")},
    **{(name, kind): "a number above zero" for name in ("power", "temperature")
       for kind in ("int64", "float32")},
    **{("index", kind): "indices count from either end" for kind in ("-1", "0", "int64")},
    **{("new_ratios", kind): "weights of any number of new rows"
       for kind in ("0", "int64", "float32", "array", "3d")},
    **{("logits", kind): "log-probabilities of one model have any number of axes of rows" for kind in ("array", "3d")},
    **{(name, kind): "parameters of one model have any number of axes of rows"
       for name in ("concentration", "quantiles", "step") for kind in ("array", "3d")},
    **{("tree", kind): "an array is a tree of one leaf" for kind in ("array", "3d")},
    **{("values", kind): "a choice of arrays" for kind in ("array", "3d")},
}  # fmt: skip

ERRORS = (TypeError, ValueError, IndexError)  # IndexError for rows that are not there


def test_every_public_function_is_here():
    ready_made = {"tree.polyak"}  # of two ensembles, which its own tests have
    elsewhere = {"scores.per_member", "combine.greedy", "resample.from_splits"}  # of functions, of splits
    elsewhere |= {"methods.distillation.targets", "methods.distillation.split_targets"}  # and of ensembles
    for room, calls in CALLS.items():
        prefix = room.__name__.removeprefix("eqx_ensemble.")
        names = getattr(room, "__all__", vars(room))
        public = {name for name in names if inspect.isfunction(getattr(room, name))}
        missing = {f"{prefix}.{name}" for name in public - set(calls)}
        assert missing <= ready_made | elsewhere, missing


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_give_our_errors_and_odd_ones_what_is_meant(name):
    faults = []
    for argument in arguments_of(name):
        for kind, value in BAD_OF_ARRAYS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fault = _fault(name, argument, kind, value)
            if fault:
                faults.append(f"`{argument}` given {kind}: {fault}")
    assert not faults, "\n".join(faults)


def _fault(name, argument, kind, value):
    try:
        result = call(name, **{argument: value})
    except ERRORS as error:
        return _raw(name, error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if value is None:
        return None if _may_be_none(name, argument) else "None was taken"
    if (argument, kind) not in MEANT:
        return "was taken"
    leaves = [np.asarray(x) for x in jax.tree.leaves(result) if hasattr(x, "dtype")]
    broken = any(np.isnan(x).any() for x in leaves if np.issubdtype(x.dtype, np.floating))
    return "the result is NaN" if broken else None


def _raw(name, error):
    """What is wrong with an error, if it is not ours."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    own = name.rpartition(".")[2]
    named = any(f"`{prefix}{own}" in str(error) for prefix in ("", f"{name.rpartition('.')[0]}."))
    named = named or f"`eqx_ensemble.{name}`" in str(error)
    return None if "eqx_ensemble" in last and named else f"{type(error).__name__} at {last}: {error}"


def _may_be_none(name, argument):
    room, _, own = name.rpartition(".")
    function = next(vars(module)[own] for module in CALLS if module.__name__ == f"eqx_ensemble.{room}")
    return inspect.signature(function).parameters[argument].default is None
