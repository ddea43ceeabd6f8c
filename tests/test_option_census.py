"""Every argument of every public function that makes, trains, saves or runs members is given bad values.

Each call gives a right result or an error of the library's own, before anything is traced. What is accepted stands in
`ACCEPTED`; what ends in another's error, with the reason, in `RAW`. NumPy's scalars do what Python's do.
"""

import inspect
import itertools
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from . import array_calls, census
from .census import Case, array

pytestmark = [pytest.mark.usefixtures("unhooked"), pytest.mark.filterwarnings("ignore")]

KEY = jax.random.key(0)
FOLDER = tempfile.TemporaryDirectory()
_counter = itertools.count()


def always(value):
    return lambda: value


def path():
    return f"{FOLDER.name}/{next(_counter)}"


def make(key):
    return eqx.nn.Linear(3, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def of_hyper(hyper):
    return optax.adam(hyper["lr"])


ADAM = optax.adam(1e-2)
HYPER = {"lr": np.array([0.1, 0.2, 0.3, 0.4], np.float32)}
DATA = np.asarray(array(12, 3)), np.asarray(array(12))
RANGES = {"lr": ee.sweep.LogUniform(1e-3, 1e-1)}
ensemble = ee.build(make, 4, key=KEY)
layered = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 2, key=KEY)
process = lambda key: ee.methods.sngp.SNGP(eqx.nn.Identity(), 3, 1, num_features=4, key=key)
gaussian_processes = ee.build(process, 2, key=KEY)
saved = path()


def setup_module():
    ee.save(saved, ensemble)


def teardown_module():
    FOLDER.cleanup()


def state(hyper=HYPER):
    return ee.train.init(ensemble, of_hyper, hyper=hyper, key=KEY)


def stepped(**options):
    step = ee.train.make_step(**options)
    return step(ee.train.init(ensemble, ADAM, key=KEY), DATA)[0].ensemble


def _made(arguments):
    return {name: make() for name, make in arguments.items() if name != "validation"}


_fit = {
    "ensemble": always(ensemble),
    "loss": always(loss),
    "optimiser": always(ADAM),
    "data": always(DATA),
    "key": always(KEY),
}
_steps = _fit | {"steps": always(2)}
_validated = _fit | {"epochs": always(2), "validation": always(DATA)}
_swept = _fit | {"optimiser": always(of_hyper), "hyper": always(HYPER)}
TRAJECTORY, SGD = ee.methods.trajectory, optax.sgd(0.1)
ADAPTERS = ee.methods.adapters
EFFICIENT = ee.methods.efficient
converted_base = {"model": always(eqx.nn.MLP(3, 1, 4, 1, key=KEY)), "num_members": always(2)}
converted = {
    "model": always(eqx.nn.MLP(3, 1, 4, 1, key=KEY)),
    "num_submembers": always(2),
    "key": always(KEY),
}


def joint():
    return EFFICIENT.batch_ensemble(make(KEY), 2, key=KEY)


def updated(optimiser):
    """The state after two steps of an optimiser that records its weights."""
    weights = jnp.ones(2)
    state = optimiser.init(weights)
    for _ in range(2):
        _, state = optimiser.update(weights, state, weights)
    return state


def normalised(key):
    return eqx.nn.BatchNorm(3, "batch", mode="batch")


def normalised_loss(model, state, batch, key):
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch[0], state)
    return jnp.mean(out), state


def _sampler(name, *options):
    return Case(
        lambda **given: updated(getattr(ee.methods.sampling, name)(**({"key": KEY} | given))),
        {"learning_rate": always(0.1), "num_rows": always(10)},
        ("learning_rate", "num_rows", "temperature", "key", *options),
    )


_SGLD = {"learning_rate": "0 int64 float32", "num_rows": "int64 float32", "temperature": "0 int64 float32"}


def recorded():
    return ee.train.init(ensemble, TRAJECTORY.swag(TRAJECTORY.snapshots(ADAM, 2, every=1)), key=KEY)


_two = lambda **trees: {name: always([tree] * 2) for name, tree in trees.items()}

CASES = {
    "build": Case(ee.build, {"make": always(make), "num_members": always(4), "key": always(KEY)}),
    "stack": Case(ee.stack, {"models": lambda: [ensemble[0], ensemble[1]]}),
    "average_parameters": Case(ee.average_parameters, {"ensemble": always(ensemble)}),
    "concatenate": Case(ee.concatenate, {"ensembles": lambda: [ensemble[:2], ensemble[2:]]}),
    "from_stacked": Case(ee.from_stacked, {"model": always(ensemble.stacked)}),
    "make_mesh": Case(ee.make_mesh, {"members": always(2)}),
    "map_members": Case(
        lambda **options: ee.map_members(**options)(ensemble, DATA[0][0]),
        {"fn": always(lambda model, x: model(x))},
        ("fn", "plan", "out_axis"),
    ),
    "member_keys": Case(ee.member_keys, {"key": always(KEY), "num_members": always(2)}),
    "Each": Case(lambda **each: ensemble(ee.Each(**each)), {"value": lambda: array(4, 3)}, ("value", "axis")),
    "Batch": Case(lambda **batch: ensemble(ee.Batch(**batch)), {"value": lambda: array(5, 3)}, ("value", "axis")),
    "predict": Case(ee.predict, {"ensemble": always(ensemble), "x": always(DATA[0])}),
    "fit": Case(ee.fit, _steps),
    "fit, validated": Case(
        ee.fit,
        _validated,
        ("epochs", "validation", "patience", "stop"),
    ),
    "train.Validation": Case(
        lambda **options: ee.fit(**_made(_validated), validation=ee.train.Validation(**options)),
        {"data": always(DATA)},
        ("score", "mode", "min_delta"),
    ),
    "train.Stopping": Case(
        lambda **options: ee.fit(**_made(_validated), validation=DATA, stop=ee.train.Stopping(**options)),
        {},
        ("target", "steps", "seconds"),
    ),
    "train.project": Case(
        lambda **options: updated(ee.train.project(**options)),
        {"optimiser": always(SGD), "fn": always(lambda params: params)},
        ("optimiser", "fn"),
    ),
    "train.every": Case(ee.train.every, {"epochs": always(2), "callback": always(print)}),
    "fit, swept": Case(ee.fit, _swept | {"steps": always(2)}, ("hyper", "rows", "shuffle")),
    "fit, saved": Case(
        lambda **options: ee.fit(**({"checkpoint": path()} | options)),
        _steps,
        ("checkpoint",),
    ),
    "train.init": Case(
        ee.train.init,
        {"ensemble": always(ensemble), "optimiser": always(ADAM), "key": always(KEY)},
    ),
    "train.make_step": Case(
        stepped, {"loss": always(loss), "optimiser": always(ADAM)}, ("loss", "optimiser", "has_aux", "plan", "mesh")
    ),
    "train.Step": Case(
        lambda **call: ee.train.make_step(loss, of_hyper)(**call),
        {"state": state, "batch": always(DATA)},
        ("state",),  # the batch is the user's loss's own
    ),
    "train.scan_steps": Case(
        ee.train.scan_steps,
        {
            "step": always(ee.train.make_step(loss, of_hyper)),
            "state": state,
            "batches": lambda: jax.tree.map(lambda x: jnp.stack([x, x]), DATA),
        },
        ("step", "state", "length"),  # the batches are the user's loss's own
    ),
    "train.revive": Case(ee.train.revive, {}),
    "save": Case(
        lambda **options: ee.save(**({"path": path()} | options)),
        {"tree": always(ensemble)},
        ("path", "tree", "meta"),
    ),
    "load": Case(ee.load, {"path": always(saved), "like": always(make)}),
    "contents": Case(ee.contents, {"path": always(saved)}),
    "train.Checkpoint": Case(
        lambda **options: ee.fit(**_made(_steps), checkpoint=ee.train.Checkpoint(**({"path": path()} | options))),
        {},
        ("path", "every"),
    ),
    "methods.population.perturb_hyper": Case(ee.methods.population.perturb_hyper, {"ranges": always(RANGES)}),
    "methods.successive_halving": Case(
        ee.methods.successive_halving,
        _fit | {"validation": always(DATA), "epochs": always(2), "factor": always(2)},
    ),
    "methods.hyperband": Case(
        ee.methods.hyperband,
        {
            "make": always(make),
            "ranges": always(RANGES),
            "loss": always(loss),
            "optimiser": always(of_hyper),
            "data": always(DATA),
            "validation": always(DATA),
            "epochs": always(2),
            "factor": always(2),
            "key": always(KEY),
        },
    ),
    "methods.priors.draw_anchors": Case(
        ee.methods.priors.draw_anchors, {"ensemble": always(ensemble), "key": always(KEY)}
    ),
    "methods.priors.gaussian_penalty": Case(
        ee.methods.priors.gaussian_penalty, {"model": always(ensemble[0]), "num_rows": always(10)}
    ),
    "methods.priors.noisy_targets": Case(
        ee.methods.priors.noisy_targets,
        {"targets": always(DATA[1]), "num_members": always(2), "std": always(0.1), "key": always(KEY)},
    ),
    "methods.alignment.align": Case(
        ee.methods.alignment.align,
        {"ensemble": always(layered), "x": always(DATA[0]), "key": always(KEY)},
    ),
    "methods.alignment.find_units": Case(ee.methods.alignment.find_units, {"model": always(layered)}),
    "methods.sngp.update_covariance": Case(
        ee.methods.sngp.update_covariance, {"ensemble": always(gaussian_processes), "x": always(DATA[0])}
    ),
    "methods.sngp.mean_field": Case(
        ee.methods.sngp.mean_field, {"mean": always(np.float32([1.0])), "variance": always(np.float32([1.0]))}
    ),
    "methods.sngp.bound_spectral_norm": Case(
        lambda **options: ee.methods.sngp.bound_spectral_norm(**options).init(jnp.ones((3, 2))),
        {"optimiser": always(SGD), "bound": always(0.5), "where": always(lambda model: model)},
        ("optimiser", "bound", "where", "num_iterations", "certified"),
    ),
    "methods.soups.greedy": Case(
        ee.methods.soups.greedy,
        {"ensemble": always(ensemble), "score": always(lambda model: jnp.sum(model.weight)), "mode": always("min")},
    ),
    "methods.adapters.low_rank": Case(ADAPTERS.low_rank, converted_base | {"rank": always(2), "key": always(KEY)}),
    "methods.adapters.scales": Case(ADAPTERS.scales, converted_base),
    "methods.adapters.bias_only": Case(ADAPTERS.bias_only, converted_base),
    "methods.adapters.layers_only": Case(ADAPTERS.layers_only, converted_base | {"where": always(lambda model: model)}),
    "methods.adapters.merge": Case(ADAPTERS.merge, {"model": lambda: ADAPTERS.scales(make(KEY), 2)[0]}),
    "methods.efficient.batch_ensemble": Case(EFFICIENT.batch_ensemble, converted),
    "methods.efficient.tabm": Case(EFFICIENT.tabm, converted),
    "methods.efficient.mimo": Case(EFFICIENT.mimo, converted),
    "methods.efficient.masksembles": Case(EFFICIENT.masksembles, converted),
    "methods.efficient.packed_ensemble": Case(EFFICIENT.packed_ensemble, converted),
    "methods.efficient.mean_loss": Case(
        lambda **options: EFFICIENT.mean_loss(**options)(joint(), DATA, KEY),
        {"loss": always(loss), "rows": always("shuffle")},
        ("loss", "rows", "repetitions", "same_inputs"),
    ),
    "methods.efficient.members": Case(EFFICIENT.members, {"joint": lambda: joint()}),
    "methods.efficient.as_members": Case(EFFICIENT.as_members, {"predictions": always(np.ones((2, 3, 4)))}),
    "methods.efficient.weight_labels": Case(EFFICIENT.weight_labels, {"params": lambda: joint()}, ()),
    "methods.trajectory.ema": Case(
        lambda **options: updated(TRAJECTORY.ema(**options)),
        {"optimiser": always(SGD)},
        ("optimiser", "decay", "start", "every"),
    ),
    "methods.trajectory.swa": Case(
        lambda **options: updated(TRAJECTORY.swa(**options)),
        {"optimiser": always(SGD)},
        ("optimiser", "start", "every"),
    ),
    "methods.trajectory.swag": Case(
        lambda **options: updated(TRAJECTORY.swag(**options)),
        {"optimiser": always(SGD)},
        ("optimiser", "rank", "start", "every"),
    ),
    "methods.trajectory.snapshots": Case(
        lambda **options: updated(TRAJECTORY.snapshots(**({"size": 2, "every": 1} | options))),
        {"optimiser": always(SGD)},
        ("optimiser", "size", "start", "every", "period"),
    ),
    "methods.trajectory.average": Case(TRAJECTORY.average, {"run": recorded}),
    "methods.trajectory.sample": Case(
        TRAJECTORY.sample, {"run": recorded, "num_samples": always(2), "key": always(KEY)}
    ),
    "methods.trajectory.snapshot_ensemble": Case(TRAJECTORY.snapshot_ensemble, {"run": recorded}),
    "methods.trajectory.snapshot_schedule": Case(
        lambda **options: TRAJECTORY.snapshot_schedule(**options)(1),
        {"init_value": always(0.1), "period": always(4)},
        ("init_value", "period"),
    ),
    "methods.trajectory.fast_geometric_schedule": Case(
        lambda **options: TRAJECTORY.fast_geometric_schedule(**options)(0),
        {"init_value": always(0.1), "end_value": always(0.2), "period": always(4)},
        ("init_value", "end_value", "period"),
    ),
    "methods.trajectory.update_batch_norm": Case(
        TRAJECTORY.update_batch_norm,
        {
            "ensemble": lambda: ee.build(eqx.nn.make_with_state(normalised), 4, key=KEY)[0],
            "state": lambda: ee.build(eqx.nn.make_with_state(normalised), 4, key=KEY)[1],
            "fn": always(normalised_loss),
            "data": always(DATA),
            "key": always(KEY),
        },
    ),
    "methods.sampling.sgld": _sampler("sgld"),
    "methods.sampling.sghmc": _sampler("sghmc", "friction"),
    "methods.sampling.psgld": _sampler("psgld", "decay", "eps", "adapt_steps"),
    "methods.sampling.cyclical_temperature": Case(
        lambda **options: ee.methods.sampling.cyclical_temperature(**options)(3),
        {"period": always(4)},
        ("period", "explore", "temperature"),
    ),
    "methods.sampling.diagnostics": Case(
        ee.methods.sampling.diagnostics, {"values": always(DATA[0]), "chains": always(np.arange(12) // 6)}
    ),
    "methods.cross_fit": Case(
        ee.methods.cross_fit,
        _steps | {"folds": lambda: ee.resample.folds(12, 4, key=KEY), "x": always(DATA[0])},
        ("folds", "x", "fn"),
    ),
    "sweep.rescale_schedule": Case(
        ee.sweep.rescale_schedule,
        {"schedule": always(lambda step: step), "length": always(10), "new_length": always(5)},
    ),
    "tree.polyak": Case(ee.tree.polyak, {"old": always(ensemble), "new": always(ensemble), "tau": always(0.5)}),
    "plan.Blocks": Case(ee.plan.Blocks, {"size": always(2)}),
    "testing.check_independent": Case(
        ee.testing.check_independent,
        {
            "make": always(make),
            "loss": always(loss),
            "optimiser": always(ADAM),
            "data": always(DATA),
            "num_members": always(2),
            "steps": always(1),
            "plans": lambda: (ee.plan.Vmap(),),
            "key": always(KEY),
        },
    ),
}

_SAVED = {"checkpoint": "text None"}

# Bad values that are good here, by argument, as labels of `census.BAD`. `None` is what the argument is by default.
ACCEPTED = {
    "methods.sngp.update_covariance": {"batch_size": "int64 None", "state": "None"},
    "methods.sngp.mean_field": {"factor": "0 int64 float32"},
    "methods.sngp.bound_spectral_norm": {"bound": "int64 float32", "num_iterations": "int64"},
    "methods.alignment.align": {"reference": "-1 0", "units": "None", "state": "None", "fn": "None"},
    "build": {"num_members": "int64"} | dict.fromkeys(["zip", "product", "shared", "mesh"], "None"),
    "stack": {"shared": "None"},
    "average_parameters": {"weights": "None"},
    "from_stacked": {"model": "array", "shared": "None"},  # an array is a tree of members
    "make_mesh": {"members": "int64 None", "data": "int64", "devices": "None"},
    "map_members": {"plan": "None", "out_axis": "-1 0"},
    "member_keys": {"num_members": "int64", "purpose": "text"},
    "Each": {"axis": "0"},
    "Batch": {"axis": "0"},
    "predict": {"batch_size": "int64"}
    | dict.fromkeys(["combine", "weights", "state", "fn", "inference", "plan", "mesh", "progress", "key"], "None"),
    "fit": {"steps": "int64", "batch_size": "int64 None", "history": "int64", "checkpoint": "text None"}
    | dict.fromkeys(["epochs", "validation", "patience", "stop", "state", "hyper", "rows"], "None")
    | dict.fromkeys(["plan", "mesh", "progress", "callbacks"], "None"),
    "fit, validated": {"epochs": "int64", "validation": "None", "patience": "int64 None", "stop": "None"},
    "train.Validation": {"score": "None", "mode": "None", "min_delta": "0 int64 float32"},
    "train.Stopping": {
        "target": "-1 0 int64 float32 None",
        "steps": "int64 None",
        "seconds": "int64 float32 None",
    },
    "train.every": {"epochs": "int64"},
    "fit, swept": {"rows": "None"},
    "fit, saved": {"checkpoint": "text None"},
    "train.init": dict.fromkeys(["state", "hyper"], "None"),
    "train.make_step": {"plan": "None", "mesh": "None"},
    "train.scan_steps": {"length": "int64 None"},
    "train.revive": {"make": "None", "optimiser": "None", "perturb": "None"},
    # Any tree can be saved, a number and a text among them; meta is JSON, in which NaN and infinity are marked.
    "save": {
        "path": "text",
        "tree": "nan inf -1 0 text int64 float32 array None",
        "meta": "nan inf -1 0 text None",
    },
    "load": {"members": "None"},
    "train.Checkpoint": {"path": "text", "every": "int64 None"},
    "methods.population.perturb_hyper": {"resample": "0 float32"},
    "methods.successive_halving": {"epochs": "int64", "steps": "None", "factor": "int64", "rungs": "int64 None"}
    | _SAVED,
    "methods.hyperband": {"epochs": "int64", "factor": "int64"} | _SAVED,
    "methods.priors.draw_anchors": {"std": "int64 float32"},
    "methods.priors.gaussian_penalty": {"model": "array", "std": "int64 float32", "num_rows": "int64 float32"},
    "methods.priors.noisy_targets": {"targets": "array", "num_members": "int64", "std": "0 int64 float32"},
    "methods.adapters.low_rank": {
        "num_members": "int64",
        "rank": "int64",
        "where": "None",
        "scale": "-1 0 int64 float32",
        "full": "None",
    },
    "methods.adapters.scales": {"num_members": "int64", "where": "None", "full": "None"},
    "methods.adapters.bias_only": {"num_members": "int64", "where": "None", "full": "None"},
    "methods.adapters.layers_only": {"num_members": "int64"},
    "methods.efficient.batch_ensemble": {"num_submembers": "int64", "where": "None", "std": "0 int64 float32"},
    "methods.efficient.tabm": {"num_submembers": "int64", "where": "None"},
    "methods.efficient.mimo": {"num_submembers": "int64", "where": "None"},
    "methods.efficient.masksembles": {"num_submembers": "int64", "where": "None", "scale": "int64"},
    "methods.efficient.packed_ensemble": {
        "num_submembers": "int64",
        "where": "None",
        "alpha": "int64 float32",
        "gamma": "int64",
    },
    "methods.efficient.weight_labels": {"params": "nan inf -1 0 text int64 float32 array None"},
    "methods.efficient.mean_loss": {"repetitions": "int64", "same_inputs": "0 float32"},
    "methods.trajectory.ema": {"decay": "0 float32", "start": "0 int64", "every": "int64"},
    "methods.trajectory.swa": {"start": "0 int64", "every": "int64"},
    "methods.trajectory.swag": {"rank": "0 int64", "start": "0 int64", "every": "int64"},
    "methods.trajectory.snapshots": {"size": "int64", "start": "0 int64", "every": "int64", "period": "int64 None"},
    "methods.trajectory.sample": {"num_samples": "int64", "scale": "0 int64 float32 None"},
    "methods.trajectory.snapshot_schedule": {"init_value": "0 int64 float32", "period": "int64"},
    "methods.trajectory.fast_geometric_schedule": {
        "init_value": "0 int64 float32",
        "end_value": "0 int64 float32",
        "period": "int64",
    },
    "methods.trajectory.update_batch_norm": {"batch_size": "int64 None"},
    "methods.sampling.sgld": _SGLD,
    "methods.sampling.sghmc": _SGLD | {"friction": "float32"},
    "methods.sampling.psgld": _SGLD | {"decay": "0 float32", "eps": "int64 float32", "adapt_steps": "int64 None"},
    "methods.sampling.cyclical_temperature": {
        "period": "int64",
        "explore": "0 float32",
        "temperature": "0 int64 float32",
    },
    "methods.cross_fit": {"fn": "None"},
    "sweep.rescale_schedule": {"length": "int64 float32", "new_length": "int64 float32"},
    "tree.polyak": {"tau": "0 float32"},
    "plan.Blocks": {"size": "int64 None", "cores": "int64 None"},
    "testing.check_independent": {
        "num_members": "int64",
        "steps": "int64",
        "batch_size": "int64 None",
        "hyper": "None",
        "rtol": "0 int64 float32",
    },
}

# What ends in an error that is not the library's: the user's own model, called with an input of another size; the
# system's, for a file that is not there.
RAW = {
    "load": {"path": "text"},
    "contents": {"path": "text"},
    "methods.alignment.align": {"x": "array"},
    "predict": {"x": "array"},
    "fit": {"data": "array"},
    "methods.sngp.update_covariance": {"state": "nan inf -1 0 text array"},
    "methods.trajectory.update_batch_norm": {"state": "nan inf -1 0 text", "data": "array"},
    "Batch": {"value": "array", "axis": "-1"},
    "testing.check_independent": {"data": "array"},
}


ROOMS = (
    ee, ee.methods, ee.methods.adapters, ee.methods.alignment, ee.methods.efficient,
    ee.methods.trajectory, ee.methods.population, ee.methods.priors, ee.methods.sampling, ee.methods.sngp,
    ee.methods.soups, ee.plan, ee.sweep, ee.testing, ee.train, ee.tree,
)  # fmt: skip
# `grid`, `draw` and the other functions of trees and arrays are in the census of array functions.
OF_ARRAYS = {name.rpartition(".")[2] for name in array_calls.NAMES}
ELSEWHERE = {
    "perturb",  # is called by `fit` and by population-based training
}


def test_every_public_function_is_here():
    cases = {name.partition(",")[0].rpartition(".")[2] for name in CASES}
    public = {name for room in ROOMS for name in dir(room) if inspect.isfunction(getattr(room, name))}
    assert {name for name in public if not name.startswith("_")} - cases - OF_ARRAYS == ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_every_option(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text is a path too
    case, found = CASES[name], {"accepted": {}, "raw": {}}
    messages = []
    for argument, label, outcome in census.outcomes(case):
        if outcome.kind == "refused":
            continue
        found[outcome.kind].setdefault(argument, []).append(label)
        messages.append(f"{outcome.kind} {argument}={label}: {outcome.message[:200]}")
        if outcome.kind == "accepted" and label in census.PYTHONS_OWN:
            expected = case.call(argument, census.PYTHONS_OWN[label])
            assert expected.kind == "accepted", f"{argument}={label} is accepted, Python's own is not"
            census.assert_same(outcome.result, expected.result)
    as_text = {kind: {argument: " ".join(labels) for argument, labels in of.items()} for kind, of in found.items()}
    expected = {"accepted": ACCEPTED.get(name, {}), "raw": RAW.get(name, {})}
    assert as_text == expected, "\n".join(messages)
