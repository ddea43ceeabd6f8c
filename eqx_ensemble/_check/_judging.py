from typing import Any

from ._options import check_number, check_word

_NEEDS_VALIDATION = {
    "target": "a member stops when its score reaches it",
    "score": "members are scored on them at the end of every epoch",
    "min_delta": "it is how much better a validation score has to be",
}


def check_mode(value: Any, *, name: str) -> None:
    """Which scores are better."""
    check_word(value, "mode", ("min", "max"), name=name)


def same_mode(value: str, before: str | None) -> None:
    """A run that goes on judges as it began."""
    if before not in (None, value):
        raise ValueError(
            f"`fit` goes on with a run whose best weights were chosen with `mode={before!r}`, got `mode={value!r}`.\n"
            "Pass the same mode; or go on from `run.train_state`, which forgets the best weights."
        )


def judging(score: Any, mode_: Any, min_delta: Any, target: Any, validation: Any) -> None:
    """What there is to judge, and how."""
    check_mode(mode_, name="fit")
    check_number(min_delta, "min_delta", name="fit", least=0)
    if validation is not None:
        return
    for word, given in (("target", target is not None), ("score", score is not None), ("min_delta", min_delta != 0)):
        if given:
            raise TypeError(f"`fit` needs `validation=` data with `{word}`: {_NEEDS_VALIDATION[word]}.")
