import numpy as np
from jaxtyping import Float

from ..train._run import Run


def last_scores(run: Run) -> Float[np.ndarray, " members"]:
    """The validation scores of the current weights `(members,)`; all NaN if the current step was not validated."""
    scores, steps = run.history.validation, run.history.validation_step
    if scores is None or len(steps) == 0 or steps[-1] != int(run.train_state.step):
        return np.full(len(run.status), np.nan)
    return scores[:, -1]
