"""Every argument of functions that check their numbers themselves is given bad values.

Each call gives a right result or an error of the library's own, before anything is traced. What is accepted stands in
`ACCEPTED`; what ends in another's error, with the reason, in `RAW`. NumPy's scalars do what Python's do.
"""

import itertools
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from . import census
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
ensemble = ee.build(make, 4, key=KEY)
process = lambda key: ee.methods.sngp.SNGP(eqx.nn.Identity(), 3, 1, num_features=4, key=key)
gaussian_processes = ee.build(process, 2, key=KEY)
saved = path()


def setup_module():
    ee.save(saved, ensemble)


def teardown_module():
    FOLDER.cleanup()


def state(hyper=HYPER):
    return ee.train.init(ensemble, of_hyper, hyper=hyper, key=KEY)


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


CASES = {
    "concatenate": Case(ee.concatenate, {"ensembles": lambda: [ensemble[:2], ensemble[2:]]}),
    "make_mesh": Case(ee.make_mesh, {"members": always(2)}),
    "Each": Case(lambda **each: ensemble(ee.Each(**each)), {"value": lambda: array(4, 3)}, ("value", "axis")),
    "fit, saved": Case(
        lambda **options: ee.fit(**({"checkpoint": path()} | options)),
        _steps,
        ("checkpoint",),
    ),
    "train.Step": Case(
        lambda **call: ee.train.make_step(loss, of_hyper)(**call),
        {"state": state, "batch": always(DATA)},
        ("state",),  # the batch is the user's loss's own
    ),
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
    "methods.adapters.low_rank": Case(ADAPTERS.low_rank, converted_base | {"rank": always(2), "key": always(KEY)}),
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
    "sweep.rescale_schedule": Case(
        ee.sweep.rescale_schedule,
        {"schedule": always(lambda step: step), "length": always(10), "new_length": always(5)},
    ),
    "tree.polyak": Case(ee.tree.polyak, {"old": always(ensemble), "new": always(ensemble), "tau": always(0.5)}),
    "plan.Blocks": Case(ee.plan.Blocks, {"size": always(2)}),
}


# Bad values that are good here, by argument, as labels of `census.BAD`. `None` is what the argument is by default.
ACCEPTED = {
    "methods.sngp.update_covariance": {"batch_size": "int64 None", "state": "None"},
    "methods.sngp.mean_field": {"factor": "0 int64 float32"},
    "methods.sngp.bound_spectral_norm": {"bound": "int64 float32", "num_iterations": "int64"},
    "make_mesh": {"members": "int64 None", "data": "int64", "devices": "None"},
    "Each": {"axis": "0"},
    "fit, saved": {"checkpoint": "text None"},
    # Any tree can be saved, a number and a text among them; meta is JSON, in which NaN and infinity are marked.
    "save": {
        "path": "text",
        "tree": "nan inf -1 0 text int64 float32 array None",
        "meta": "nan inf -1 0 text None",
    },
    "load": {"members": "None"},
    "train.Checkpoint": {"path": "text", "every": "int64 None"},
    "methods.adapters.low_rank": {
        "num_members": "int64",
        "rank": "int64",
        "where": "None",
        "scale": "-1 0 int64 float32",
        "full": "None",
    },
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
    "sweep.rescale_schedule": {"length": "int64 float32", "new_length": "int64 float32"},
    "tree.polyak": {"tau": "0 float32"},
    "plan.Blocks": {"size": "int64 None", "cores": "int64 None"},
}

# What ends in an error that is not the library's: the user's own model, called with an input of another size; the
# system's, for a file that is not there.
RAW = {
    "load": {"path": "text"},
    "contents": {"path": "text"},
    "methods.sngp.update_covariance": {"state": "nan inf -1 0 text array"},
    "methods.trajectory.update_batch_norm": {"state": "nan inf -1 0 text", "data": "array"},
}


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
