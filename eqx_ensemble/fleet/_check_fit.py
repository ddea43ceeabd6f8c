"""The checks of `fit`, in the caller's process: on workers, its errors would come after shards were submitted."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx

from .._axes._check_rows import check_rows_of_data
from .._check import check_integers_fit, check_positive_int
from .._ensemble import Ensemble
from .._ensemble._check_state import check_model_state_given
from .._suggest import meant_text
from ..train._check import check_hyper_used, check_optimiser, check_patience, check_same_structure, check_scoring
from ..train._check_fit import check_choices, check_history
from ..train._run import Run
from ..train._state import check_state
from ..train._trainable import partition_trainable
from ..train.compiled._check import check_loss_signature
from ..train.data._check import check_batch_size
from ..train.data._check_reader import check_no_scan
from ..train.data._data import as_row_indices, without_marks
from ..train.data._functions import is_data_function
from ..train.data._reader import RowReader
from ..train.host._check import check_not_given_again, check_same_mode, missing_validation_message
from ._options import FleetFitOptions

_KNOWN = sorted(FleetFitOptions.__optional_keys__)
_REFUSED = ("max_seconds", "callbacks", "callback_every")  # unless they are `None`


def check_known(options: Iterable[str], *, name: str) -> None:
    """Raises for options that `fit` does not have."""
    for word in options:
        if word not in _KNOWN and word not in _REFUSED:
            hint = meant_text(word, _KNOWN) or f"Its options are {', '.join(f'`{known}`' for known in _KNOWN)}."
            raise TypeError(f"`{name}` has no option `{word}`.\n{hint}")


def check_options(options: dict[str, Any], *, name: str) -> None:
    """Raises for invalid options, and for options without those they require."""
    of = lambda word, *, default=None: options.get(word, default)
    check_choices(
        has_aux=of("has_aux", default=False), progress=None, scan=of("scan"), score=of("score"),
        order=of("order", default="each"), how=of("on_diverge", default="freeze"), name=name,
    )  # fmt: skip
    check_history(of("history", default="all"), name=name)
    check_patience(of("patience"), of("validation"), name=name)
    check_scoring(of("score"), of("mode"), of("min_delta", default=0.0), of("target"), of("validation"), name=name)
    if of("batch_size") is not None:
        check_positive_int(of("batch_size"), "batch_size", name=name)


def check_start_options(begun: Any, optimiser: Any, options: dict[str, Any], *, name: str) -> None:
    """Raises for options that the start of a run does not take, or lacks; `None` is built on the worker."""
    if begun is None or isinstance(begun, Ensemble):
        check_optimiser(optimiser, hyper=options.get("hyper"), name=name)
    if isinstance(begun, Ensemble):
        check_integers_fit((begun.stacked, begun.shared), argument="ensemble", name=name)
        check_model_state_given(begun.stacked, options.get("state"), name=name)
        partition_trainable(begun, options.get("trainable", eqx.is_inexact_array), name=name)
    elif begun is not None:
        given = [word for word in ("state", "hyper") if options.get(word) is not None]
        given += ["trainable"] * (options.get("trainable", eqx.is_inexact_array) is not eqx.is_inexact_array)
        check_not_given_again(given, name=name)
        check_state(_train_state(begun), optimiser, name=name)
        _check_selection(begun, options, name=name)


def _check_selection(begun: Any, options: dict[str, Any], *, name: str) -> None:
    """Raises unless a run with best weights continues with validation data, and with the same mode."""
    selection = begun.selection if isinstance(begun, Run) else None
    if selection is not None and options.get("validation") is None:
        raise TypeError(missing_validation_message(name))
    if selection is not None:
        check_same_mode(options.get("mode") or "min", selection.mode, name=name)


def _train_state(begun: Any) -> Any:
    return begun.train_state if isinstance(begun, Run) else begun


def check_losses(begun: Any, loss: Any, optimiser: Any, options: dict[str, Any], *, name: str) -> None:
    """Raises unless the loss and the score can be called as documented, and use the hyper-parameters if any."""
    if begun is None and callable(loss):  # whether its members have a state is seen on the worker
        return
    first = begun is None or isinstance(begun, Ensemble)
    hyper = options.get("hyper") if first else _train_state(begun).hyper
    stateful = (options.get("state") if first else _train_state(begun).model_state) is not None
    fns = [loss] if options.get("score") is None else [loss, options["score"]]
    wants_hyper = [check_loss_signature(fn, stateful=stateful, hyper=hyper, name=name) for fn in fns]
    if hyper is not None:
        check_hyper_used(optimiser, wants_hyper=any(wants_hyper), name=name)


def check_data(sources: dict[str, Any], num_members: int, options: dict[str, Any], *, name: str) -> None:
    """Raises unless data and validation data are arrays of rows, and fit to `batch_size` and `rows`."""
    data, validation = sources["data"], sources["validation"]
    of_arrays = lambda x, word: check_rows_of_data(x, num_members, argument=word, name=name, finite=False)
    if not is_data_function(data):
        if isinstance(data, RowReader):
            check_no_scan(options.get("scan"), name=name)
        num_rows = data.num_rows if isinstance(data, RowReader) else of_arrays(data, "data")
        rows = as_row_indices(options.get("rows"), num_members, num_rows, name=name)
        check_batch_size(options.get("batch_size"), num_rows if rows is None else rows.shape[1], name=name)
    if validation is None or is_data_function(validation):
        return
    of_arrays(validation, "validation")
    if options.get("score") is None and not is_data_function(data) and not isinstance(data, RowReader):
        check_same_structure(without_marks(validation), without_marks(data), name=name)
