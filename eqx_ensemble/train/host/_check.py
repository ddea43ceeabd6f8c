from typing import Any

import jax

from ..._caller import caller


def check_not_given_again(given: list[str]) -> None:
    """Raises for arguments that the training state already contains."""
    if given:
        words = ", ".join(f"`{word}`" for word in given)
        them = "it" if len(given) == 1 else "them"
        raise TypeError(
            f"`{caller()}` continues a training state, which already contains {words}: omit {them}.\n"
            "To change hyper-parameters: `equinox.tree_at(lambda s: s.hyper, state, new)`."
        )


def missing_validation_message() -> str:
    """The message that a run with best weights continues without validation data."""
    return (
        f"`{caller()}` continues a run with best weights by a validation score, and needs `validation=` again.\n"
        "To continue from the last weights without the best: `fit(run.train_state, ...)`."
    )


def check_opt_state(found: Any, expected: Any) -> None:
    """Raises unless the optimiser is the one that made the state."""
    found = jax.eval_shape(lambda tree: tree, found)  # the dtypes that NumPy's arrays have in JAX
    shapes = lambda tree: [(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if jax.tree.structure(found) == jax.tree.structure(expected) and shapes(found) == shapes(expected):
        return
    own, other = ", ".join(_state_names(found)), ", ".join(_state_names(expected))
    words = "arrays of other shapes or dtypes, as for other `params`" if own == other else other or "nothing"
    raise TypeError(
        f"`{caller()}` got a training state that another optimiser made: its optimiser state holds {own or 'nothing'}; "
        f"this optimiser's would hold {words}.\nPass the optimiser of the state, or begin anew with `train.init`."
    )


def _state_names(opt_state: Any) -> list[str]:
    """The names of the states of optax's transformations, in their order."""
    if isinstance(opt_state, tuple) and hasattr(opt_state, "_fields"):
        return [type(opt_state).__name__]
    parts = opt_state if isinstance(opt_state, tuple | list) else ()
    return [name for part in parts for name in _state_names(part)]


def check_same_mode(value: str, before: str | None) -> None:
    """Raises if a run is continued with another `mode`."""
    if before not in (None, value):
        raise ValueError(
            f"`{caller()}` continues a run whose best weights were chosen with `mode={before!r}`, got "
            f"`mode={value!r}`.\nPass the same mode; or continue from `run.train_state`, without the best weights."
        )


def ended_message(step: int, *, saved: bool, failed: OSError | None) -> str:
    """The note on an error that ended a run."""
    note = f"`fit` ended after {step} steps; this error's `run` is the run so far."
    if failed is not None:
        return f"{note} It could not be saved: {failed.strerror or failed}"
    return f"{note} Rerunning the same call resumes there." if saved else note


def lost_run_message(error: Exception) -> str:
    """The note on an error that ended a run, if the run could not be collected."""
    return f"`fit` could not keep the run so far: {type(error).__name__}: {error}"
