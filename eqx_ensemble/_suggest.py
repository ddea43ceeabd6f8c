"""Misspelt options and names: their errors name the ones that were likely meant. Calls without an error pay nothing."""

import difflib
import functools as ft
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_OWN = __name__.partition(".")[0]

# The words of other libraries, and ours; the first that a function or a module has is named.
_OURS = {
    "aggregate aggregation reduce": ["combine", "reduction"],
    "alpha confidence confidence_level coverage error_rate quantile significance": ["level", "levels"],
    "batch minibatch_size": ["batch_size"],
    "best_f best_value f_best incumbent y_max y_min": ["best"],
    "brier_score": ["brier"],
    "callback callback_every": ["callbacks"],
    "checkpoint_every resume save_every": ["checkpoint"],
    "config hparams hyper_parameters hyperparameters param_grid params search_space": ["hyper", "ranges"],
    "cores num_cores num_threads threads": ["count", "plan"],
    "criterion loss_fn loss_function objective": ["loss"],
    "cv": ["folds", "num_folds"],
    "device devices": ["mesh", "devices"],
    "direction maximise maximize minimise minimize": ["mode"],
    "dir directory file filename": ["folder", "path", "checkpoint"],
    "early_stopping n_iter_no_change": ["patience"],
    "ensemble_size n n_estimators n_members n_models num num_estimators num_models num_particles": [
        "num_members",
        "members",
    ],
    "epoch epochs max_epochs n_epochs nb_epoch num_epochs": ["epochs", "max_iter", "steps"],
    "estimator model models net network": ["ensemble", "make", "models"],
    "eval is_training train training": ["inference"],
    "eval_set val val_data valid validation_data": ["validation"],
    "expected_calibration_error": ["ece"],
    "f func function apply_fn": ["fn"],
    "factory init_fn make_model model_fn": ["make"],
    "inputs features": ["x", "data"],
    "iterations max_iter n_iter n_steps num_iterations num_steps": ["steps", "max_steps", "epochs", "length"],
    "max_seconds max_steps max_time time_limit": ["stop"],
    "learning_rate lr": ["learning_rate", "optimiser"],
    "log_loss cross_entropy": ["nll"],
    "mask": ["row_weights"],
    "metric metrics monitor scoring": ["score", "validation"],
    "min_improvement tol": ["min_delta", "validation"],
    "min_delta mode score smooth smoothing": ["validation"],
    "mse mean_squared_error": ["rmse"],
    "n_bins bins nbins": ["num_bins", "bins"],
    "n_folds n_splits num_splits": ["num_folds"],
    "n_jobs num_workers": ["workers", "count", "plan"],
    "n_samples size": ["num_samples", "num_draws"],
    "opt optim optimizer optimizers solver tx": ["optimiser"],
    "pred preds y_pred y_score": ["predictions", "logits", "mean", "scores"],
    "prng_key random_seed random_state rng rngs seed": ["key", "random_state"],
    "q": ["size", "num_picks"],
    "roc_auc roc_auc_score": ["auroc"],
    "sample_weight sample_weights": ["row_weights", "weights"],
    "scan": ["plan"],
    "sharding": ["mesh", "shard"],
    "std sigma scale_tril": ["variance", "scale"],
    "target": ["targets", "labels", "stop", "data"],
    "y y_true": ["targets", "labels", "data"],
    "validation_split val_split": ["validation_fraction", "validation"],
    "verbose": ["progress", "verbose"],
    "vmap filter_vmap": ["map_members"],
}
_TRANSLATIONS = {word: ours for words, ours in _OURS.items() for word in words.split()}
_OF_SCORES = "metric metrics min_delta mode monitor score scoring smooth smoothing"
_OF_VALIDATION = (
    " The score is a part of it: `ee.train.Validation(data, score=..., mode=..., min_delta=..., smooth=...)`."
)
_OF_STOPPING = " It takes `ee.train.Stopping(target=..., steps=..., seconds=...)`."
_OF_CHECKPOINT = " It takes `ee.train.Checkpoint(path, every=...)`."
_OF_CORES = "cores n_jobs num_cores num_threads num_workers threads".split()
_REMARKS = {  # on our word
    **{(word, "validation"): _OF_VALIDATION for word in _OF_SCORES.split()},
    **{(word, "stop"): _OF_STOPPING for word in "max_seconds max_steps max_time target time_limit".split()},
    **{(word, "checkpoint"): _OF_CHECKPOINT for word in "checkpoint_every resume save_every".split()},
    ("callback_every", "callbacks"): " Each may have its period: `ee.train.every(100, callback)`.",
    **{(word, "plan"): " Its option is the number of cores: `ee.plan.Cores(count=2)`." for word in _OF_CORES},
    ("scan", "plan"): " It is an option of the plan: `ee.plan.Vmap(scan=False)`.",
    ("alpha", "level"): " It is the coverage, 1 - alpha.",
    ("error_rate", "level"): " It is the coverage, 1 - error_rate.",
    ("learning_rate", "optimiser"): " It takes the learning rate: `optax.adam(1e-3)`.",
    ("lr", "optimiser"): " It takes the learning rate: `optax.adam(1e-3)`.",
    ("sigma", "variance"): " It is the square.",
    ("std", "variance"): " It is the square.",
    ("train", "inference"): " It is the opposite: `inference=True`, the default, turns dropout off.",
    ("training", "inference"): " It is the opposite: `inference=True`, the default, turns dropout off.",
    ("validation_split", "validation"): " It takes the rows themselves: split them from `data` first.",
}
_CONSTRUCTORS = {  # what to call in place of a class whose arguments are wrong
    "Ensemble": "An ensemble of models is `ee.stack(models)`; `ee.build(make, num_members, key=key)` makes the models."
}

_SEVERAL = {"batch": "arrays", "data": "arrays", "ensembles": "ensembles", "models": "models"}  # in a tuple or list

_inner: dict[Callable[..., Any], Callable[..., Any]] = {}
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def meant_text(word: str, known: Collection[str]) -> str:
    """The question whether one of `known` was meant by `word`; an empty text if none is likely."""
    likely = _likely(word, known)
    return f"{_question(likely)}{_REMARKS.get((word, likely[0]), '')}" if likely else ""


def _likely(word: str, known: Collection[str]) -> list[str]:
    spelled = {name.lower(): name for name in known}
    own = spelled.get(word.lower())
    translated = [own] if own else [ours for ours in _TRANSLATIONS.get(word.lower(), ()) if ours in known]
    close = difflib.get_close_matches(word, known, n=3)
    return translated[:1] or close or [spelled[name] for name in difflib.get_close_matches(word.lower(), spelled, n=3)]


def _question(names: Iterable[str]) -> str:
    return f"Did you mean {' or '.join(f'`{name}`' for name in names)}?"


def explain_names(package: str) -> None:
    """Makes the functions and classes of a package name misspelt options, and the package misspelt attributes."""
    module: Any = sys.modules[package]
    for name, value in list(vars(module).items()):
        if not name.startswith("_"):
            setattr(module, name, explain_calls(value, package, name))
    module.__getattr__ = ft.partial(refuse_attribute, package)


def explain_calls(value: Any, package: str, name: str) -> Any:
    """A public function, whose errors of unknown options name the likely ones; a class, after that of its `__init__`.

    The function of the same name inside the library stays as it is.
    """
    if not str(getattr(value, "__module__", "")).startswith(f"{_OWN}."):
        return value
    path = f"{package}.{name}".removeprefix(f"{_OWN}.")
    if isinstance(value, types.FunctionType):
        public: Any = value if value in _inner else explain_as(path)(value)
        public.__module__, public.__qualname__ = package, name  # by which it is serialised
        return public
    init = vars(value).get("__init__") if isinstance(value, type) and not issubclass(value, BaseException) else None
    if isinstance(init, types.FunctionType):
        value.__init__ = explain_as(path)(init)
    return value


def inner_function(fn: Any) -> Any:
    """The library's own function, for one that `explain_calls` has made public; anything else unchanged."""
    return _inner.get(fn, fn) if isinstance(fn, types.FunctionType) else fn


def explain_as(path: str, *, transfers: bool = True) -> Callable[[_F], _F]:
    """A decorator: the errors of calls that do not fit a function's signature name the likely options.

    With `transfers`, the function moves what it is called with and what it computes on the host; see `_transfers`.

    Public functions get it from their package. Those that others pass their options on to get it where they are
    defined. Messages find `path` in the frame of `call`; see `_caller`.
    """
    # Here: `import eqx_ensemble` alone imports this module, but not JAX.
    from ._caller import hide_own_frames
    from ._transfers import call_transferring

    def decorate(fn: Any) -> Any:
        @ft.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                return call_transferring(fn, args, kwargs) if transfers else fn(*args, **kwargs)
            except Exception as error:
                if isinstance(error, TypeError | AttributeError):
                    _explain(error, fn, args, kwargs, path)
                hide_own_frames(error)
                raise

        _inner[call] = fn
        return call

    return decorate


def _explain(error: Exception, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], path: str) -> None:
    """Names the likely option in the error of a call that does not fit the signature."""
    signature = inspect.signature(fn)
    kinds = {name: x.kind for name, x in signature.parameters.items() if name != "self"}
    known = [name for name, kind in kinds.items() if kind in (_EITHER, inspect.Parameter.KEYWORD_ONLY)]
    unknown = [word for word in kwargs if word not in known]
    fits = _fits(signature, args, kwargs)
    if fits and not unknown:  # the error is of something else
        return
    likely = {word: meant for word in unknown if (meant := meant_text(word, known))}
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds.values():
        word = next(iter(likely), unknown[0])
        hint = likely.get(word) or f"Its arguments are {', '.join(f'`{x}`' for x in known)}."
        error.args = (f"`{path}` got an unexpected keyword argument '{word}'.\n{hint}",)
    else:  # other options are passed on, to a function that may have refused one, or named the likely one itself
        for word, meant in likely.items():
            if (not fits or f"'{word}'" in str(error)) and "Did you mean" not in str(error):
                error.args = (f"{error}\n`{path}` itself has no option `{word}`. {meant}",)
    if not fits and path in _CONSTRUCTORS:
        error.args = (f"{error}\n{_CONSTRUCTORS[path]}",)
    elif not fits and not unknown:
        error.args = (f"{error}\n{_call_text(path, signature, args)}",)


def _call_text(path: str, signature: inspect.Signature, args: Any) -> str:
    """How a function is called, for calls with too few or too many arguments."""
    parameters = [x for name, x in signature.parameters.items() if name != "self"]
    positional = [x.name for x in parameters if x.kind in (_EITHER, inspect.Parameter.POSITIONAL_ONLY)]
    needed = [f"{x.name}=..." for x in parameters if x.kind == inspect.Parameter.KEYWORD_ONLY and x.default is x.empty]
    text = f"Call it as `{path}({', '.join([*positional, *needed])})`"
    if not args and positional == ["fn"]:
        return f"{text}, or `@functools.partial({path}, ...)` as a decorator with options."
    if len(args) - ("self" in signature.parameters) <= len(positional):
        return f"{text}."
    several = next((name for name in positional if name in _SEVERAL), None)
    rest = f"several {_SEVERAL[several]} are one argument, `{several}`" if several else "other options go by name"
    return f"{text}; {rest}."


def _fits(signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def refuse_attribute(package: str, name: str) -> Any:
    """Raises for an attribute that a package does not have."""
    hint = "" if name.startswith("_") else attribute_text(package, name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}{hint and '. '}{hint}")


def attribute_text(package: str, name: str) -> str:
    """The question whether another public name was meant, of this package or of another; empty if none is likely."""
    homes: dict[str, list[str]] = {}
    for home, public in _public_names(_OWN):
        homes.setdefault(public, []).append(f"ee{home.removeprefix(_OWN)}.{public}")
    own = [public for home, public in _public_names(package) if home == package]
    if name not in homes and (likely := _likely(name, own)):
        return _question(likely)
    paths = [path for likely in ([name] if name in homes else _likely(name, homes)) for path in homes[likely]]
    return _question(sorted(paths, key=lambda path: path.count("."))) if paths else ""


def _public_names(package: str) -> Iterator[tuple[str, str]]:
    """The packages and names that the source of a package exports: importing all of them would take seconds."""
    spec: Any = importlib.util.find_spec(package)
    source = spec.loader.get_source(package) or ""
    for home, name in re.findall(r"^ *from (\S+) import (\w+) as \2$", source, re.MULTILINE):
        yield package, name
        if home == ".":
            yield from _public_names(f"{package}.{name}")
