from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ._arrays import check_weight_count
from ._judging import judging
from ._leaves import kind_text, path_text
from ._options import MOST_STEPS, check_counter, check_positive_int, check_word


def _length(epochs: Any, steps: Any, *, name: str) -> None:
    """A run is measured in epochs or in steps."""
    if (epochs is None) == (steps is None):
        got = "neither" if epochs is None else "both"
        raise TypeError(f"`{name}` needs either `epochs` or `steps`, got {got}.")
    if steps is None:
        check_counter(epochs, "epochs", name=name)
    else:
        check_counter(steps, "steps", name=name)


def _patience(value: Any, validation: Any, *, name: str) -> None:
    """Stopping early needs something to judge by."""
    if value is None:
        return
    check_counter(value, "patience", name=name)
    if validation is None:
        raise TypeError(f"`{name}` needs `validation=` data with `patience`: it stops on the validation score.")


def fit_options(
    order: Any,
    orders: tuple[str, ...],
    *,
    epochs: Any,
    steps: Any,
    patience: Any,
    validation: Any,
    target: Any,
    score: Any,
    mode: Any,
    min_delta: Any,
    on_diverge: Any,
) -> None:
    """The options of `fit` that can be judged by themselves."""
    check_word(order, "order", orders, name="fit")
    if type(on_diverge).__name__ != "Revive":
        check_word(on_diverge, "on_diverge", ("freeze", "revive", "raise"), name="fit")
    _length(epochs, steps, name="fit")
    _patience(patience, validation, name="fit")
    judging(score, mode, min_delta, target, validation)


def limit(value: Any, argument: str, num_members: int, *, name: str, whole: bool = False) -> np.ndarray | None:
    """A number for all members or one each, as `(members,)`; of steps and seconds, a positive one."""
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.shape not in ((), (num_members,)) or numbers.dtype.kind not in ("iu" if whole else "iuf"):
        kind = "a whole number" if whole else "a number"
        raise TypeError(f"`{name}` needs `{argument}` to be {kind}, or one each ({num_members},), got {value!r}.")
    if not np.isfinite(numbers).all() or (argument != "target" and (numbers <= 0).any()):
        raise ValueError(
            f"`{name}` needs `{argument}` to be {'finite' if argument == 'target' else 'positive'}, got {value!r}."
        )
    if whole and (numbers > MOST_STEPS).any():
        raise ValueError(
            f"`{name}` needs `{argument}` of at most {MOST_STEPS}, because compiled programs count in 32 bits; got "
            f"{value!r}."
        )
    return np.broadcast_to(numbers, (num_members,))


def countable(last_step: int | None, *, name: str) -> None:
    """The steps of a run can be counted."""
    if last_step is not None and last_step > MOST_STEPS:
        raise ValueError(
            f"`{name}` counts at most {MOST_STEPS} steps, those of the runs before included; this call would end at "
            f"step {last_step}.\nAsk for fewer: a run that is to end by `patience` or `target` needs no more."
        )


def revive(make: Any, perturb: Any, most: Any) -> None:
    """How members come back."""
    for argument, value in (("make", make), ("perturb", perturb)):
        if value is not None and not callable(value):
            raise TypeError(f"`Revive` needs `{argument}` to be a function, got {value!r}.")
    check_positive_int(most, "most", name="Revive")


IDLE_PATIENCE = (
    "`patience` stopped no member: it counts validations, which are made at the end of every epoch, and the run ended "
    "within the first.\nPass an iterable of batches that ends after each epoch."
)


def patience_fits(patience: Any, num_steps: int, per_epoch: int, first_step: int, *, name: str) -> None:
    """At least one epoch ends, so that patience can act."""
    if patience is not None and first_step % per_epoch + num_steps < per_epoch:
        raise ValueError(
            f"`{name}` cannot use `patience`: it counts validations, which are made at the end of every epoch, and "
            f"the {num_steps} steps asked for end within an epoch of {per_epoch}."
        )


def no_array_options(*, batch_size: Any, rows: Any, order: Any, scan: Any, name: str) -> None:
    """An iterable of batches decides itself about rows and batches."""
    used = {"batch_size": batch_size is not None, "rows": rows is not None, "order": order != "each"}
    used["scan"] = scan is not None
    given = [f"`{word}`" for word, is_used in used.items() if is_used]
    if given:
        raise TypeError(
            f"`{name}` takes {', '.join(given)} for data in arrays; an iterable of batches decides that itself."
        )


def one_pass_only(data: Any, epochs: Any) -> None:
    """Several epochs need data that can be iterated several times, which iterators cannot.

    An object whose own `__iter__` does anything may start anew there, and is taken at its word.
    """
    code = getattr(type(data).__iter__, "__code__", None)
    if epochs is None or epochs == 1 or not isinstance(data, Iterator) or (code is not None and code.co_names):
        return
    raise ValueError(
        f"`fit` iterates an iterable of batches once an epoch; with `epochs={epochs}` got {kind_text(data)}, which "
        "gives its batches only once.\nPass an object that starts anew each time (a list, a loader); or make it "
        "endless and give `steps`."
    )


def some_batches(count: int, epoch: int, *, name: str) -> None:
    """An epoch of an iterable of batches had batches."""
    if count > 0:
        return
    if epoch == 0:
        raise ValueError(f"`{name}` needs at least one batch, but the iterable of batches is empty.")
    raise ValueError(
        f"`{name}` found no batches in epoch {epoch + 1}: the iterable can be iterated only once, as a generator.\n"
        "Pass an object that starts anew each time, or make the generator endless and give `steps`."
    )


def same_outputs(first: Any, now: Any) -> None:
    """Auxiliary outputs `(members, ...)` have one shape in all steps, so that the history can hold them in arrays."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(first)
    if jax.tree.structure(now) != structure:
        raise TypeError(f"The loss's auxiliary outputs changed from {structure} to {jax.tree.structure(now)}.")
    for (path, x), y in zip(keyed, jax.tree.leaves(now), strict=True):
        if x.shape != y.shape:
            raise ValueError(
                f"The loss's auxiliary output at `{path_text(path[1:])}` has shape {x.shape[1:]} for one batch and "
                f"{y.shape[1:]} for a smaller one; the history needs one shape.\n"
                "Reduce it over the batch, or choose a `batch_size` that divides the number of rows."
            )


def many_shapes(seen: Collection[tuple[tuple[tuple[int, ...], Any], ...]]) -> str:
    """The warning that batches of ever new shapes compile ever new programs."""
    sizes = sorted({shape for shapes in seen for shape, _ in shapes})
    return (
        f"`fit` was handed batches of {len(seen)} different shapes and compiled a program for each: "
        f"{', '.join(map(str, sizes[:8]))}.\nPad batches to a few sizes: compiling takes longer than training."
    )


def left_out(ids: Any, healthy: Any, *, name: str) -> str:
    """The warning, or the error, that predictions do without members that diverged."""
    if not healthy.any():
        return f"`{name}` has nobody to ask: all {len(ids)} members diverged."
    return f"`{name}` leaves out {len(ids)} member(s) that diverged: {', '.join(map(str, ids.tolist()))}."


def weights_left(weights: Any, healthy: np.ndarray, combine: Any, *, name: str) -> np.ndarray | None:
    """The weights of the healthy members, which sum to 1."""
    if weights is None:
        return None
    if combine is None:
        raise TypeError(f"`{name}` needs `combine=` with `weights`: predictions of single members have no weights.")
    check_weight_count(weights, len(healthy), name=name)
    left = np.asarray(weights, float)[healthy]
    if not np.isfinite(left).all() or (left < 0).any() or (left.size and left.sum() == 0):
        raise ValueError(f"`{name}` needs weights that are finite, not negative and not all zero, got {weights!r}.")
    return left / left.sum() if left.size else left


def smaller_plan(plan: str, less: str, *, name: str) -> str:
    """The warning that a plan did not fit."""
    return f"`{name}` ran out of memory under `{plan}` and goes on under `{less}`."


def out_of_memory(num_members: int, plan: str, less: str | None, error: str, *, name: str) -> str:
    """The message that says what to try when memory has run out."""
    first = error.splitlines()[0] if error else "RESOURCE_EXHAUSTED"
    hint = f'Try `plan=eqx_ensemble.plan.{less}`, or `plan="auto"`, which looks for what fits.'
    if less is None:
        hint = "Not even one member at a time fits: choose a smaller `batch_size`."
    return f"`{name}` ran out of memory with {num_members} members under `{plan}`: {first}\n{hint}"


def diverged(ids: Any, left: Any, faults: Any, *, first_step: int = -1, integers: Sequence[str] = ()) -> str:
    """The warning that names members which diverged, in a run that began at `first_step`, on data with `integers`."""
    each = zip(ids.tolist(), left.tolist(), faults.tolist(), strict=True)
    listed = ", ".join(f"{member} at step {step} (`{fault}`)" for member, step, fault in each)
    lines = [
        f"{len(ids)} member(s) diverged and keep their last finite weights (id, step, what was not finite): {listed}.",
        "`run.healthy` leaves them out; a smaller learning rate or gradient clipping often helps.",
    ]
    of_loss = faults == "loss"
    if (of_loss & (left == first_step)).all():
        lines[1] = (
            "Their loss was not finite before any update: the cause lies in the loss, the model or the data, not in "
            "the learning rate."
        )
    if of_loss.any() and integers:
        lines.append(f"{'; '.join(integers)}: a class label beyond a model's outputs makes the loss NaN.")
    return "\n".join(lines)


def nothing_twice(given: list[str]) -> None:
    """A training state has its model state and hyper-parameters already."""
    if given:
        words = ", ".join(f"`{name}`" for name in given)
        raise TypeError(
            f"`fit` goes on from a training state, which has its own: leave out {words}.\n"
            "To change hyper-parameters: `equinox.tree_at(lambda s: s.hyper, state, new)`."
        )


def goes_on(training: np.ndarray, *, ids: np.ndarray) -> None:
    """Somebody still trains."""
    if not training.any():
        raise ValueError(
            f"`fit` has nothing to go on with: all {len(ids)} members have stopped or diverged.\n"
            "To train their weights anew, pass the ensemble: `fit(run.ensemble, ...)`."
        )


FORGETS_THE_BEST = (
    "`fit` goes on from a run whose members have their best weights by a validation score, and needs `validation=` "
    "again.\nTo go on from the last weights and forget the best: `fit(run.train_state, ...)`."
)


def state_of_optimiser(found: Any, expected: Any) -> None:
    """The optimiser is the one that made the state."""
    shapes = lambda tree: [(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if jax.tree.structure(found) != jax.tree.structure(expected) or shapes(found) != shapes(expected):
        raise TypeError(
            "`fit` goes on from a training state that another optimiser made: its optimiser state is\n"
            f"{jax.tree.structure(found)}, this optimiser's would be\n{jax.tree.structure(expected)}."
        )


def goes_on_with_data(*, able: bool) -> None:
    """Batches can be taken up where another run stopped."""
    if not able:
        raise TypeError(
            "`fit` goes on from a run that stopped within an epoch of an iterator that can be set to a place "
            "(`set_state`, `load_state_dict`), but these batches cannot.\n"
            "Pass an iterator of the same kind; or go on from `run.train_state`, with an epoch from its beginning."
        )
