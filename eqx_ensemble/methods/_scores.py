import numpy as np
from jaxtyping import Float

from ..train._run import Run


def check_some_score(scores: np.ndarray, training: np.ndarray, *, name: str) -> None:
    """Raises if no member that trains has a validation score by which members could be compared."""
    if np.isnan(scores[training]).all():
        raise ValueError(
            f"`{name}` cannot compare members: the validation scores of all {int(training.sum())} members that train "
            "are NaN.\nA metric may be undefined for these rows, such as the recall of a class that they lack: return "
            "a number there."
        )


def last_scores(run: Run) -> Float[np.ndarray, " members"]:
    """The validation scores of the current weights `(members,)`; all NaN if the current step was not validated."""
    scores, steps = run.history.validation, run.history.validation_step
    if scores is None or len(steps) == 0 or steps[-1] != int(run.train_state.step):
        return np.full(len(run.status), np.nan)
    return scores[:, -1]
