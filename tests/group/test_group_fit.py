import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .models import KEY, Stateful, assert_close, make_group, mse, rows

SGD = optax.sgd(0.05)
X = rows(21)
DATA = X, jnp.stack([X[:, 0], X[:, 1] * 2], axis=1)
VALIDATION = tuple(x[:6] for x in DATA)
POSITIONS = {"linear": [0, 3], "wide": [1, 2, 4]}
ORDER = [3, 0, 1, 4, 2]
HOW = {"epochs": 2, "batch_size": 8, "validation": VALIDATION, "key": KEY}


@pytest.fixture(scope="module")
def group():
    """A linear, two wide, a linear and a wide member."""
    return make_group(KEY, sizes=(3, 2))[ORDER]


@pytest.fixture(scope="module")
def run(group):
    return ee.fit(group, mse, SGD, DATA, **HOW)


def test_each_part_is_what_training_it_alone_gives(group, run):
    assert run.group.ids.tolist() == group.ids.tolist() == ORDER
    for part, positions in POSITIONS.items():
        alone = ee.fit(group[part], mse, SGD, DATA, **HOW)
        assert eqx.tree_equal(run.runs[part].ensemble, alone.ensemble)
        assert eqx.tree_equal(run.runs[part].train_state, alone.train_state)
        for name in ("loss", "validation"):
            np.testing.assert_array_equal(getattr(run.history, name)[positions], getattr(alone.history, name))
        np.testing.assert_array_equal(run.status[positions], alone.status)
        np.testing.assert_array_equal(run.table()["validation"][positions], alone.best_score)
        np.testing.assert_array_equal(run.predict(X)[np.array(positions)], alone.predict(X))
    assert not eqx.tree_equal(group["wide"], run.group["wide"])
    other = ee.Ensemble(group["wide"].stacked, group["wide"].shared, group["wide"].ids + 5)
    assert not eqx.tree_equal(ee.fit(other, mse, SGD, DATA, **HOW).ensemble.stacked, run.runs["wide"].ensemble.stacked)


def test_what_a_run_says(group, run):
    table = run.table()
    assert list(table) == ["member", "part", "loss", "validation", "best_step", "status", "stopped_at"]
    assert table["member"].tolist() == ORDER
    assert table["part"].tolist() == ["linear", "wide", "wide", "linear", "wide"]
    best = run.best(2)
    assert best.ids.tolist() == table["member"][np.argsort(table["validation"])[:2]].tolist()
    assert str(run).startswith("GroupRun of 5 members in 2 parts\n  linear\n    Run of 2 members, 6 steps\n")
    assert run.healthy.ids.tolist() == ORDER
    np.testing.assert_array_equal(run.history.validation_step, [3, 6])
    assert run.history.aux is None


@pytest.mark.slow
def test_arguments_of_members_go_to_their_parts(group):
    """Hyper-parameters, rows, limits and data of each member, of the group and of the parts."""
    by = {"lr": np.float32([0.1, 0.2, 0.3, 0.4, 0.5])}
    folds = np.stack([np.arange(i, i + 12) for i in range(5)])
    own = ee.Each(jnp.stack([DATA[0] * (1 + i) for i in range(5)])), DATA[1]
    optimiser = lambda hyper: optax.sgd(hyper["lr"] * 0.1)
    limits = np.array([1, 2, 3, 4, 5])
    how = {"epochs": 3, "batch_size": 8, "key": KEY}
    run = ee.fit(group, mse, optimiser, own, hyper=by, rows=folds, stop=ee.train.Stopping(steps=limits), **how)
    np.testing.assert_array_equal(run.table()["stopped_at"], [1, 2, 3, 4, 5])
    take = lambda part: np.array(POSITIONS[part])
    parts = {"hyper": by, "rows": folds, "stop": ee.train.Stopping(steps=limits)}
    named = {name: {p: jax.tree.map(lambda x, p=p: x[take(p)], v) for p in POSITIONS} for name, v in parts.items()}
    data = {part: (ee.Each(own[0].value[take(part)]), own[1]) for part in POSITIONS}
    assert eqx.tree_equal(ee.fit(group, mse, optimiser, data, **named, **how).group, run.group)
    some = ee.fit(group["wide"], mse, optimiser, data["wide"], **{name: v["wide"] for name, v in named.items()}, **how)
    assert eqx.tree_equal(some.ensemble, run.runs["wide"].ensemble)


@pytest.mark.slow
def test_functions_of_the_parts(group, run):
    doubled = lambda model, batch, key: 2 * mse(model, batch, key)
    losses, optimisers = {"wide": mse, "linear": doubled}, {"wide": SGD, "linear": optax.sgd(0.025)}
    found = ee.fit(group, losses, optimisers, DATA, **HOW)
    assert eqx.tree_equal(found.runs["wide"].ensemble, run.runs["wide"].ensemble)
    assert_close(found.runs["linear"].ensemble.stacked.weight, run.runs["linear"].ensemble.stacked.weight)
    assert_close(found.runs["linear"].history.loss, 2 * run.runs["linear"].history.loss)


@pytest.mark.slow
def test_parts_of_different_lengths(group, run):
    how = HOW | {"epochs": {"wide": 2, "linear": 1}, "batch_size": {"wide": 8, "linear": 11}}
    found = ee.fit(group, mse, SGD, DATA, **how)
    history = found.history
    assert history.loss.shape == (5, 6)
    assert np.isnan(history.loss[POSITIONS["linear"], 2:]).all()
    np.testing.assert_array_equal(history.loss[POSITIONS["wide"]], run.history.loss[POSITIONS["wide"]])
    np.testing.assert_array_equal(history.validation_step, [2, 3, 6])
    assert np.isfinite(history.validation).tolist() == [[True, False, False], *[[False, True, True]] * 2] + [
        [True, False, False],
        [False, True, True],
    ]


@pytest.mark.slow
def test_it_continues_and_batches_can_be_iterated(group, run):
    batches = [tuple(x[i : i + 8] for x in DATA) for i in (0, 8, 16)]
    whole = ee.fit(group, mse, SGD, batches, epochs=2, key=KEY)
    first = ee.fit(group, mse, SGD, batches, epochs=1, key=KEY)
    second = ee.fit(first, mse, SGD, batches, epochs=1, key=KEY)
    assert eqx.tree_equal(whole.group, second.group)
    assert second.history.loss.shape == (5, 6)


@pytest.mark.slow
def test_a_run_in_a_folder_resumes(group, run, tmp_path):
    stop = lambda progress: 3 in progress.ids and progress.step >= 3
    with pytest.warns(UserWarning, match=r"interrupted; these parts .* are not in the run: `wide`"):
        part = ee.fit(group, mse, SGD, DATA, checkpoint=tmp_path, callbacks=ee.train.every(3, stop), **HOW)
    assert part.group.ids.tolist() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear"]
    must, never = (ee.checkpoint.Checkpoints(tmp_path, resume=how) for how in ("must", "never"))
    with pytest.raises(FileExistsError, match="`fit` must not resume"):
        ee.fit(group, mse, SGD, DATA, checkpoint=never, **HOW)
    whole = ee.fit(group, mse, SGD, DATA, checkpoint=must, **HOW)  # a part has no checkpoint yet
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear", "wide"]
    assert eqx.tree_equal(whole.group, run.group)
    again = ee.fit(group, mse, SGD, DATA, checkpoint=must, **HOW)
    assert eqx.tree_equal(again.group, run.group)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged")
def test_members_that_diverge(group):
    # lr of 1e30 in one wide member and both linear ones, in the order of the group
    hyper = {"lr": np.float32([1e30, 0.05, 1e30, 1e30, 0.05])}
    run = ee.fit(group, mse, lambda h: optax.sgd(h["lr"]), DATA, steps=6, hyper=hyper, batch_size=8, key=KEY)
    assert run.status.tolist() == [2, 0, 2, 2, 0]
    assert run.healthy.ids.tolist() == [0, 2]
    fn = {"linear": None, "wide": lambda model, x: model(x)}
    weights = [0.2, 0.3, 0.1, 0.1, 0.3]
    with pytest.warns(UserWarning, match=r"`GroupRun.predict` excludes 3 member\(s\) that diverged: 3, 1, 4."):
        found = run.predict(X, fn=fn, combine=ee.combine.mean, weights=weights)
    assert_close(found, np.mean([jax.vmap(model)(X) for model in run.healthy], axis=0))
    with pytest.raises(ee.train.DivergedError):
        run.predict(X, strict=True)
    options = {"hyper": hyper, "on_diverge": "raise", "batch_size": 8, "key": KEY}
    with pytest.raises(ee.train.DivergedError) as caught:
        ee.fit(group, mse, lambda h: optax.sgd(h["lr"]), DATA, steps=6, **options)
    assert isinstance(caught.value.run, ee.GroupRun)
    assert list(caught.value.run.runs) == ["linear"]
    assert "Raised for part `linear` of the group." in caught.value.__notes__


@pytest.mark.slow
def test_stateful_parts(group):
    def stateful_mse(model, state, batch, key):
        x, y = batch
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((out - y) ** 2), state

    ensemble, state = ee.build(eqx.nn.make_with_state(Stateful), ids=[7, 8], key=KEY)
    mixed = ee.Group({"norm": ensemble, "linear": group["linear"]})
    losses = {"norm": stateful_mse, "linear": mse}
    run = ee.fit(mixed, losses, SGD, DATA, state={"norm": state}, epochs=1, key=KEY)
    alone = ee.fit(ensemble, stateful_mse, SGD, DATA, state=state, epochs=1, key=KEY)
    np.testing.assert_array_equal(run.predict(X)[:2], alone.predict(X))
    assert run.runs["linear"].state is None
    with pytest.raises(TypeError, match=r"`GroupRun.best` .*'norm' have some.*\n.*run.runs\['norm'\]`, then"):
        run.best(by=np.arange(len(mixed)), mode="max")


def test_runs_that_were_trained_separately(group, run):
    joined = ee.GroupRun({part: run.runs[part] for part in ("wide", "linear")})
    assert joined.group.ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(joined.predict(X)[np.array(ORDER)], run.predict(X))


def test_members_are_ranked_by_scores_of_one_mode(run):
    other = run.runs["wide"]
    highest = dataclasses.replace(other, selection=dataclasses.replace(other.selection, mode="max"))
    joined = ee.GroupRun({"linear": run.runs["linear"], "wide": highest})
    with pytest.raises(ValueError, match="`GroupRun.best` needs .* one `mode`, got 'min' of `linear` and 'max' of"):
        joined.best()
    assert joined.best(by=np.arange(5), mode="max").ids.tolist() == joined.group.ids.tolist()[-1:]


@pytest.mark.slow
def test_on_a_mesh(group, run):
    found = ee.fit(make_group(KEY, sizes=(4, 4)), mse, SGD, DATA, mesh=ee.make_mesh(), **HOW)
    alone = ee.fit(make_group(KEY, sizes=(4, 4)), mse, SGD, DATA, **HOW)
    assert_close(found.predict(X), alone.predict(X))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ee.plan.Sequential(), ee.plan.Chunked(2)], ids=repr)
def test_a_plan_changes_nothing(group, run, plan):
    assert_close(ee.fit(group, mse, SGD, DATA, plan=plan, **HOW).predict(X), run.predict(X))


BAD = {
    "an iterator": (
        lambda group, run: ee.fit(group, mse, SGD, iter([DATA]), steps=1, key=KEY),
        "TypeError: `fit` trains the parts of a group one after another, and a list_iterator can be iterated only once."
        "\nPass what can be iterated again, such as a loader or a list, or an iterator for each part: "
        "`{'linear': ..., 'wide': ...}`.",
    ),
    "a missing loss": (
        lambda group, run: ee.fit(group, {"wide": mse}, SGD, DATA, steps=1, key=KEY),
        "ValueError: `fit` needs `loss` for every part of the group, 'linear', 'wide'; there is none for 'linear'.",
    ),
    "rows of a part": (
        lambda group, run: ee.fit(group, mse, SGD, DATA, rows=np.zeros((3, 4), int), steps=1, key=KEY),
        "MemberMismatchError: `fit` needs one value per member of the group: expected (5, ...), got (3, 4).",
    ),
    "the state of a part": (
        lambda group, run: ee.fit(group, mse, SGD, DATA, state={"conv": None}, steps=1, key=KEY),
        "TypeError: `fit` needs the `state` of a group as a dict from the names of its stateful parts to their states; "
        "the parts are 'linear', 'wide', got keys ['conv'].",
    ),
    "a run of a group": (
        lambda group, run: ee.average_parameters(run),
        "TypeError: `average_parameters` needs an `Ensemble` or a `Group`, got a run of a group: pass `run.group`.",
    ),
    "ensembles as runs": (
        lambda group, run: ee.GroupRun(dict(group.parts)),
        "TypeError: `GroupRun` needs runs of `fit`, got an Ensemble for the part 'linear'.",
    ),
    "a list of runs": (
        lambda group, run: ee.GroupRun([]),
        "TypeError: `GroupRun` needs a dict from the names of parts to their runs, got a list.",
    ),
    "equal ids": (
        lambda group, run: ee.GroupRun(dict.fromkeys("ab", run.runs["linear"])),
        "ValueError: `GroupRun` needs members with different ids, because each member's random stream follows from its "
        "id; the parts `a` and `b` both have [3, 4].\nBuild each ensemble with its own before training: `build(make, "
        "ids=range(4, 8), key=key)`.",
    ),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_messages(group, run, call, message):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        call(group, run)
    assert f"{type(caught.value).__name__}: {caught.value}" == message
