"""Every public optimiser and transform of optax, found by introspection, and how each is made."""

import functools
import inspect
import types
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib

RATE = 1e-2

NOT_TRAINED = {
    "lookahead": "trains pairs of weights, `LookaheadParams`, which are no model",
    "contrib.differentially_private_aggregate": "needs gradients per example, which a mean over the batch has lost",
    "contrib.dpsgd": "needs gradients per example, which a mean over the batch has lost",
    "monitor": "changes the structure of its state at the first step, which no compiled loop can follow",
    "measure_with_ema": "gives measurements in place of updates, for `monitor`",
}


def _only_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _only_vectors(params):
    return jax.tree.map(lambda x: x.ndim == 1, params)


def _muon_numbers(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def measure(updates, **_):
    return optax.tree.norm(updates)


def _even(step, **_):
    return step % 2 == 0


def _adam():
    return optax.adam(RATE)


def _with_params(make):
    """For a transform that wants to be made with the parameters' tree at hand."""
    return optax.GradientTransformation(
        lambda params: make(params).init(params), lambda grads, state, params: make(params).update(grads, state, params)
    )


# What the members would share if they could: the norm of their gradients is theirs, so that is what is made visible.
ARGUMENTS = {
    "adaptive_grad_clip": lambda make: make(0.05),
    "add_noise": lambda make: make(0.1, 0.55, 0),
    "apply_if_finite": lambda make: make(_adam(), 3),
    "chain": lambda make: make(optax.clip_by_global_norm(0.1), optax.trace(0.9)),
    "clip": lambda make: make(0.01),
    "clip_by_block_rms": lambda make: make(0.01),
    "clip_by_global_norm": lambda make: make(0.1),
    "conditionally_mask": lambda make: make(optax.normalize_by_update_norm(), _even),
    "conditionally_transform": lambda make: make(optax.normalize_by_update_norm(), _even),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(optax.normalize_by_update_norm()),
    "freeze": lambda make: make(_only_vectors),
    "inject_hyperparams": lambda make: make(optax.lamb)(learning_rate=optax.linear_schedule(RATE, 0.0, 20)),
    "inject_stateful_hyperparams": lambda make: make(optax.lamb)(learning_rate=RATE),
    "masked": lambda make: make(optax.normalize_by_update_norm(), _only_matrices),
    "multi_transform": lambda make: make({"matrix": optax.lamb(RATE), "vector": optax.sgd(RATE)}, _labels),
    "named_chain": lambda make: make(("clip", optax.clip_by_global_norm(0.1)), ("adam", optax.scale_by_adam())),
    "noisy_sgd": lambda make: make(RATE, eta=0.1, key=0),
    "partition": lambda make: make({"matrix": optax.lamb(RATE), "vector": optax.sgd(RATE)}, _labels),
    "scale": lambda make: make(0.5),
    "scale_by_backtracking_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10, store_grad=True)),
    "scale_by_schedule": lambda make: make(lambda count: 1 / (1 + count)),
    "scale_by_zoom_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10)),
    "selective_transform": lambda make: _with_params(
        lambda params: make(optax.lamb(RATE), freeze_mask=_only_vectors(params))
    ),
    "scale_by_distance_over_gradients": lambda make: optax.chain(make(reps_rel=0.05), optax.scale(-1.0)),
    "contrib.scale_by_muon": lambda make: optax.masked(make(weight_dimension_numbers=_muon_numbers), _only_matrices),
    "snapshot": lambda make: make("norm", measure),
    "stateless": lambda make: make(
        lambda updates, params: jax.tree.map(lambda g: g / optax.tree.norm(updates), updates)
    ),
    "stateless_with_tree_map": lambda make: make(lambda g, p: g / jnp.linalg.norm(p)),
    "trace": lambda make: make(0.9),
    "with_extra_args_support": lambda make: make(optax.normalize_by_update_norm()),
    "contrib.galore": lambda make: make(RATE, rank=2, update_proj_gap=5),
    "contrib.dadapt_adamw": lambda make: make(estim_lr0=1e-2),
    "contrib.dog": lambda make: make(init_step=("heuristic", 1e-2)),
    "contrib.dowg": lambda make: make(init_estim_sq_dist=1e-2),
    "contrib.mechanize": lambda make: make(optax.sgd(RATE), s_init=0.1),
    "contrib.prodigy": lambda make: make(estim_lr0=1e-2),
    "contrib.reduce_on_plateau": lambda make: make(patience=2, rtol=0.2),
    "contrib.sam": lambda make: make(optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
    "contrib.scale_by_galore": lambda make: make(rank=2, update_proj_gap=5),
    "contrib.schedule_free": lambda make: make(_adam(), RATE),
    "contrib.split_real_and_imaginary": lambda make: make(optax.normalize_by_update_norm()),
    "adafactor": lambda make: make(RATE, min_dim_size_to_factor=4),
    "scale_by_factored_rms": lambda make: make(min_dim_size_to_factor=4),
    "multi steps": lambda make: optax.MultiSteps(
        optax.lamb(RATE), 3, should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=30.0)
    ).gradient_transformation(),
}

# Complete optimisers; what is not one and has no learning rate is followed by a step against the gradient.
COMPLETE = {
    "adadelta", "contrib.cocob", "contrib.dadapt_adamw", "contrib.dog", "contrib.dowg", "contrib.mechanize",
    "contrib.momo", "contrib.momo_adam", "contrib.prodigy", "contrib.sam", "contrib.schedule_free_adamw",
    "contrib.schedule_free_sgd", "inject_hyperparams", "inject_stateful_hyperparams", "keep_params_nonnegative",
    "lbfgs", "multi steps", "multi_transform", "partition", "polyak_sgd", "scale_by_backtracking_linesearch",
    "scale_by_distance_over_gradients", "scale_by_zoom_linesearch", "selective_transform",
}  # fmt: skip

# Reductions over all parameters, over a leaf, over an axis, and noise: where members would mix if they could.
TELLING = [
    "adafactor", "adaptive_grad_clip", "adam", "add_noise", "apply_if_finite", "clip_by_block_rms",
    "clip_by_global_norm", "lamb", "normalize_by_update_norm", "polyak_sgd", "sm3", "multi_transform", "multi steps",
    "inject_hyperparams", "contrib.dog", "contrib.mechanize", "contrib.momo", "contrib.muon", "contrib.prodigy",
    "contrib.reduce_on_plateau", "contrib.sam", "contrib.sophia",
]  # fmt: skip


def required(fn):
    required = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    return {p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _with_defaults(fn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return fn(**dict.fromkeys(required(fn), RATE))


def _returns_transform(fn):
    returned = inspect.signature(fn).return_annotation
    if returned is inspect.Signature.empty:  # some are not annotated
        return "GradientTransformation" in inspect.getsource(fn)
    return "GradientTransformation" in str(returned)


def _public():
    found = {"multi steps": None}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, fn in vars(module).items():
            if name.startswith("_") or not isinstance(fn, types.FunctionType | functools.partial):
                continue
            if prefix + name in ARGUMENTS or _returns_transform(fn):
                found[prefix + name] = fn
    return found


PUBLIC = _public()
TRAINED = [name for name in PUBLIC if name not in NOT_TRAINED]


def _transform(name):
    if name in ARGUMENTS:
        return ARGUMENTS[name](PUBLIC[name])
    return _with_defaults(PUBLIC[name])


@functools.cache
def optimiser(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optax's own, at some aliases
        made = _transform(name)
    assert isinstance(made, optax.GradientTransformation)
    takes_rate = PUBLIC[name] is not None and "learning_rate" in inspect.signature(PUBLIC[name]).parameters
    return made if takes_rate or name in COMPLETE else optax.chain(made, optax.scale(-RATE))
