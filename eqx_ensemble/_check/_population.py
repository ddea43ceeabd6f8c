import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._leaves import kind_text
from ._marks import check_positive_int
from ._options import check_number, check_sequence


def places(values: Any, num_members: int, *, name: str, once: bool = False) -> np.ndarray:
    """Places among the members, each at most once where that is asked for."""
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) == 0:
        raise TypeError(f"`{name}` needs places among the members, a list of whole numbers; got {values!r}.")
    if found.min() < 0 or found.max() >= num_members:
        raise ValueError(
            f"`{name}` needs places from 0 to {num_members - 1}, got {found.min()} to {found.max()}.\n"
            "A place is where a member stands in the ensemble, not its id."
        )
    if once and len(np.unique(found)) < len(found):
        raise ValueError(
            f"`{name}` needs every member at most once, because ids are unique; got {found.tolist()}.\n"
            "`population.clone` makes members copies of others."
        )
    return found


def one_donor_each(donors: np.ndarray, able: np.ndarray, ids: np.ndarray) -> None:
    """A donor for each member, none of them lost."""
    if len(donors) != len(able):
        raise ValueError(f"`population.clone` needs one donor per member ({len(able)},), got ({len(donors)},).")
    unfit = np.unique(donors[(donors != np.arange(len(able))) & ~able[donors]])
    if len(unfit):
        raise ValueError(
            "`population.clone` needs donors that train; these have diverged or stopped: members "
            f"{', '.join(map(str, ids[unfit].tolist()))}."
        )


def part_of_members(fraction: Any, *, name: str) -> None:
    """A part of the members, at most half of them."""
    if not isinstance(fraction, numbers.Real) or not 0 < float(fraction) <= 0.5:
        raise ValueError(f"`{name}` needs `fraction` to be above 0 and at most 0.5, got {fraction!r}.")


def positive_factors(factors: Any, *, name: str) -> list[float]:
    """At least one number above zero."""
    listed = [
        check_number(factor, "factors", name=name)
        for factor in check_sequence(factors, "factors", name=name, of="numbers")
    ]
    if not listed or min(listed) <= 0:
        raise ValueError(f"`{name}` needs `factors` to be positive numbers, such as `(0.8, 1.2)`; got {factors!r}.")
    return listed


def names_in(names: Iterable[str], hyper: Any, *, name: str) -> None:
    """Ranges belong to hyper-parameters that are there."""
    if not isinstance(hyper, dict) or set(names) - set(hyper):
        found = f"names {sorted(hyper)}" if isinstance(hyper, dict) else kind_text(hyper)
        raise ValueError(f"`{name}` has ranges of {sorted(names)}, but the hyper-parameters are {found}.")


def has_hyper(hyper: Any, *, name: str) -> None:
    """There is something to change."""
    if hyper is None:
        raise TypeError(
            f"`{name}` needs a training state with hyper-parameters: pass `hyper=` to `fit` or `train.init`."
        )


def same_hyper(old: Any, new: Any, *, name: str) -> None:
    """A member's new hyper-parameters have the structure, the shapes and the kinds of its old ones."""
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes(old) != shapes(new):
        raise TypeError(
            f"`{name}` needs a function that returns hyper-parameters like those it is given: expected "
            f"{jax.tree.structure(old)} of shapes {shapes(old)}, got {jax.tree.structure(new)} of {shapes(new)}."
        )
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(old)[0], jax.tree.leaves(new), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.inexact) and np.asarray(y).dtype.kind == "f":
            raise TypeError(
                f"`{name}` needs whole numbers where there were whole numbers; at `{jax.tree_util.keystr(path)}`: "
                f"got {y!r} for {x.dtype}.\nRound it in the function that changes it, or make it a float in `hyper`."
            )


def judged(hyper: Any, validation: Any, *, name: str) -> None:
    """There is something to search, and something to judge by."""
    if hyper is None:
        raise TypeError(f"`{name}` needs `hyper`, the hyper-parameters that it is to improve.")
    if validation is None:
        raise TypeError(f"`{name}` needs `validation=` data: members are compared by their score on it.")


def halving(factor: Any, rungs: Any, *, name: str) -> float | int:
    """Fewer members at every rung: the factor as Python's number."""
    if not isinstance(factor, int | float | np.number) or not 1 < float(factor) < math.inf:
        raise ValueError(f"`{name}` needs `factor` to be above 1, got {factor!r}.")
    if rungs is not None:
        check_positive_int(rungs, "rungs", name=name)
    return int(factor) if float(factor).is_integer() else float(factor)


def one_length_of(name: str, **lengths: Any) -> tuple[str, int]:
    """The one of some lengths that was given: its name, and what it says."""
    given = {unit: length for unit, length in lengths.items() if length is not None}
    if len(given) != 1:
        words = " or ".join(f"`{unit}`" for unit in lengths)
        raise TypeError(f"`{name}` needs either {words}, got {'both' if given else 'neither'}.")
    ((unit, length),) = given.items()
    check_positive_int(length, unit, name=name)
    return unit, length


def member_scores(scores: Any, *, name: str) -> np.ndarray:
    """One score per member."""
    try:
        found = np.asarray(scores, float)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` needs one score per member as numbers `(members,)`, got {scores!r}.") from None
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"`{name}` needs one score per member `(members,)`, got shape {found.shape}.")
    return found


def who_is_healthy(healthy: Any, num_members: int, *, name: str) -> np.ndarray:
    """One boolean per member."""
    found = np.ones(num_members, bool) if healthy is None else np.asarray(healthy)
    if found.shape != (num_members,) or found.dtype != bool:
        raise TypeError(
            f"`{name}` needs one boolean per member in `healthy` ({num_members},), got {found.dtype} of shape "
            f'{found.shape}.\nFrom a run: `run.status == "ok"`.'
        )
    return found


def no_options(options: Mapping[str, Any], names: Iterable[str], why: str, *, name: str) -> None:
    """Options of `fit` that make no sense here."""
    given = [f"`{word}`" for word in names if options.get(word) is not None]
    if given:
        raise TypeError(f"`{name}` does not take {', '.join(given)}: {why}.")


def no_saving(options: Mapping[str, Any], *, name: str) -> None:
    """A search that is made of several runs does not save itself."""
    no_options(options, ("checkpoint", "every"), "it is made of several runs; save what it returns", name=name)


def whole_epochs(steps: Any, *, is_batches: bool, name: str) -> None:
    """An iterable begins anew in every round."""
    if is_batches and steps is not None:
        raise TypeError(
            f"`{name}` needs `epochs`, not `steps`, with an iterable of batches: it begins anew with every round, so "
            "that rounds of a few steps would see the same few batches again and again."
        )


def own_revival(on_diverge: Any) -> None:
    """A population replaces members that diverge itself."""
    if on_diverge not in (None, "freeze", "raise"):
        raise TypeError(
            "`population_based_training` does not take `on_diverge` to revive members: it replaces those that diverged "
            "after each round."
        )
