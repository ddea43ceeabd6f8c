import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from .models import KEY, LISTED, WIDE, Stateful, assert_close, linear, looped, rows

ROWS = 21
WEIGHTS = np.float32([0.1, 0.3, 0.0, 0.4, 0.2])


@pytest.fixture(scope="module")
def group():
    return ee.group(LISTED)


@pytest.fixture(scope="module")
def expected():
    return looped(LISTED, rows(ROWS))


HOW = {
    "few rows": {},
    "batches": {"batch_size": 8},
    "a budget": {"batch_size": 8, "memory": 2**25},
    "a plan each": {"plan": {"Linear": ee.plan.Chunked(1), "MLP": "auto", "MLP_2": None}, "batch_size": 8},
}
SLOW = {
    "sequential": {"batch_size": 8, "plan": ee.plan.Sequential()},
    "a mesh": {"batch_size": 8, "mesh": True},
    "few rows on a mesh": {"mesh": True},
}
CASES = [pytest.param(how, id=name) for name, how in HOW.items()]
CASES += [pytest.param(how, id=name, marks=pytest.mark.slow) for name, how in SLOW.items()]


@pytest.mark.parametrize("how", CASES)
def test_is_the_loop_over_the_list(group, expected, how):
    how = how | ({"mesh": ee.make_mesh()} if "mesh" in how else {})
    found = ee.predict(group, rows(ROWS), **how)
    assert_close(found, expected)
    assert not np.allclose(found[::-1], expected)
    mixture = ee.predict(group, rows(ROWS), combine=ee.combine.mixture, weights=WEIGHTS, **how)
    assert_close(mixture, ee.combine.mixture(expected, weights=WEIGHTS))
    own = ee.predict(group, rows(ROWS), combine=ordered, weights=WEIGHTS, **how)
    assert_close(own, np.einsum("m,mrc->rc", WEIGHTS * np.arange(5), expected))


def ordered(predictions, *, weights):
    """A function that takes members in their order."""
    return jnp.einsum("m,mrc->rc", jnp.asarray(weights, predictions.dtype) * jnp.arange(5.0), predictions)


def test_weights_of_each_row(group, expected):
    weights = np.float32(np.random.default_rng(0).random((5, ROWS)))
    for how in ({}, {"batch_size": 8}):
        found = ee.predict(group, rows(ROWS), combine=ee.combine.mean, weights=weights, **how)
        assert_close(found, np.einsum("mr,mrc->rc", weights / weights.sum(0), expected))


@pytest.mark.slow
def test_members_are_taken_a_few_at_a_time(group, expected, monkeypatch):
    """A budget that only one member of one row fits: predictions of several are never held."""
    from eqx_ensemble._predict import _run_works as _block_sizes

    seen, note = [], _block_sizes.BlockSizes.note

    def say(sizes, _):
        seen.append(sizes.block)
        note(sizes, 2**20 * sizes.block.members * sizes.block.rows)

    monkeypatch.setattr(_block_sizes.BlockSizes, "note", say)
    held = []

    class Mean(ee.combine.AbstractCombination):
        def update(self, partial, predictions, *, weights=None):
            held.append(len(predictions))
            weights = jnp.ones(len(predictions)) if weights is None else jnp.asarray(weights, jnp.float32)
            return self.merge(partial, (jnp.einsum("m,mrc->rc", weights, predictions), weights.sum()))

        def merge(self, first, second):
            return second if first is None else jax.tree.map(jnp.add, first, second)

        def finish(self, partial):
            return partial[0] / partial[1]

    found = ee.predict(group, rows(ROWS), combine=Mean(), weights=WEIGHTS, memory=2**21 + 1, batch_size=16)
    assert_close(found, ee.combine.mean(expected, weights=WEIGHTS))
    assert seen[-1].members * seen[-1].rows <= 2
    assert held[-5:] == [1] * 5


def test_inputs_of_their_own(group):
    own = jax.random.normal(KEY, (5, ROWS, 3))
    expected = np.stack([np.asarray(jax.vmap(model)(x)) for model, x in zip(LISTED, own, strict=True)])
    assert_close(ee.predict(group, ee.Each(own), batch_size=8), expected)
    by_part = {"Linear": ee.Each(own[jnp.array([1, 4])]), "MLP": ee.Each(own[::2][:2]), "MLP_2": own[3]}
    assert_close(ee.predict(group, by_part, batch_size=8), expected)


def test_functions_of_the_parts(group, expected):
    fn = {"Linear": lambda m, x: m(x)[:1], "MLP": lambda m, x: m(x)[1:], "MLP_2": lambda m, x: m(x)[1:]}
    want = np.where(np.array([0, 1, 0, 0, 1])[:, None, None] == 1, expected[..., :1], expected[..., 1:])
    assert_close(ee.predict(group, rows(ROWS), fn=fn), want)
    assert_close(ee.predict(group, rows(ROWS), fn=fn, batch_size=8), want)


def test_no_rows(group):
    assert ee.predict(group, rows(0)).shape == (5, 0, 2)
    weights = np.ones((5, 0), np.float32)
    for given in (None, WEIGHTS, weights):
        assert ee.predict(group, rows(0), combine=ee.combine.mean, weights=given).shape == (0, 2)


def test_stateful_parts_have_a_state_each():
    ensemble, state = ee.build(eqx.nn.make_with_state(Stateful), ids=[3, 4], key=KEY)
    group = ee.Group({"norm": ensemble, "linear": ee.build(linear, 2, key=KEY)})
    alone = ee.predict(ensemble, rows(ROWS), state=state), ee.predict(group["linear"], rows(ROWS))
    for batch_size in (8, 64):
        found = ee.predict(group, rows(ROWS), state={"norm": state}, batch_size=batch_size)
        assert_close(found, np.concatenate(alone))  # programs of other numbers of rows round otherwise
    with pytest.raises(TypeError, match="members are stateful") as caught:
        ee.predict(group, rows(ROWS))
    assert "Raised for part `norm` of the group." in caught.value.__notes__
    with pytest.raises(TypeError, match=r"a dict from the names of its stateful parts.*'linear', 'norm', got"):
        ee.predict(group, rows(ROWS), state=state)


def test_keys_follow_the_ids_of_the_members():
    noisy = lambda key: eqx.nn.Sequential([linear(key), eqx.nn.Dropout(0.5)])
    group = ee.group([noisy(KEY), linear(KEY), noisy(jax.random.key(1))])
    fn = {"Linear": lambda model, x, key: model(x), "Sequential": lambda model, x, key: model(x, key=key)}
    how = {"inference": False, "key": KEY, "batch_size": 8}
    found = ee.predict(group, rows(ROWS), fn=fn, **how)
    np.testing.assert_array_equal(found[np.array([0, 2])], ee.predict(group["Sequential"], rows(ROWS), **how))
    assert not np.allclose(found[0], found[2])


def test_inside_jit(group, expected):
    found = eqx.filter_jit(lambda group, x: ee.predict(group, x, combine=ee.combine.mean))(group, rows(ROWS))
    assert_close(found, expected.mean(0))


@pytest.mark.slow
def test_predictions_need_to_know_nothing_of_the_parts(group, expected):
    """Combinations, scores and the rest take one axis of members."""
    targets = jax.random.normal(jax.random.key(2), (ROWS, 2))
    found = ee.predict(group, rows(ROWS))
    np.testing.assert_allclose(ee.scores.rmse(found, targets), ee.scores.rmse(expected, targets), rtol=1e-5)
    log_scores = -jnp.sum((found - targets[None]) ** 2, axis=-1)
    weights = ee.combine.weights.stacking(log_scores).weights
    assert weights.shape == (5,)
    small, kept = ee.prune_members(group, weights, above=1e-3)
    again = ee.predict(small, rows(ROWS), combine=ee.combine.mean, weights=kept)
    assert_close(again, ee.combine.mean(found[np.flatnonzero(weights > 1e-3)], weights=kept))


BAD = {
    "two shapes": (
        lambda: ee.predict(ee.group([LISTED[0], eqx.nn.Linear(3, 4, key=KEY)]), rows(), batch_size=4),
        "MemberMismatchError: `predict` needs the same shape, structure and dtype from the members of all parts.\n"
        "  part `Linear`: f32[4]\n  part `MLP`: f32[2]\nPass a function of a model for each part that returns the "
        "same: `predict(group, x, fn={part: lambda model, x: ...})`.",
    ),
    "two dtypes": (
        lambda: ee.predict(ee.group(LISTED[:2]), rows(), fn={"MLP": call, "Linear": half}, memory=2**25),
        "MemberMismatchError: `predict` needs the same shape, structure and dtype from the members of all parts.\n"
        "  part `Linear`: bf16[2]\n  part `MLP`: f32[2]\nPass a function of a model for each part that returns the "
        "same: `predict(group, x, fn={part: lambda model, x: ...})`.",
    ),
    "a missing function": (
        lambda: ee.predict(ee.group(LISTED[:2]), rows(), fn={"MLP": call}),
        "ValueError: `predict` needs `fn` for every part of the group, 'Linear', 'MLP'; there is none for 'Linear'.",
    ),
    "an unknown part": (
        lambda: ee.predict(ee.group(LISTED[:2]), rows(), plan={"MPL": None, "MLP": None, "Linear": None}),
        "ValueError: `predict` needs `plan` for every part of the group, 'Linear', 'MLP'; there is no part 'MPL'.",
    ),
    "rows that differ": (
        lambda: ee.predict(ee.group(LISTED[:2]), {"MLP": rows(3), "Linear": rows(4)}),
        "ValueError: `predict` needs the same rows for all parts of a group; got 4 for `Linear`, 3 for `MLP`.",
    ),
    "too few values": (
        lambda: ee.predict(ee.group(LISTED), ee.Each(jnp.ones((2, 4, 3)))),
        "MemberMismatchError: `predict` needs one value per member of the group: expected (5, ...), got (2, 4, 3).",
    ),
    "weights of a part": (
        lambda: ee.predict(ee.group(LISTED), rows(), combine=ee.combine.mean, weights=np.ones(2)),
        "ValueError: `predict` needs one weight per member.\n  expected shape (5,), got (2,)\nWeights are in the order "
        "of the members.",
    ),
    "a batch": (
        lambda: ee.predict(ee.group(LISTED), ee.Batch(rows())),
        "TypeError: `predict` takes the rows as they are: pass `x` instead of `Batch(x)`.",
    ),
}


def call(model, x):
    return model(x)


def half(model, x):
    return model(x).astype(jnp.bfloat16)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_messages(call, message):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        call()
    assert f"{type(caught.value).__name__}: {caught.value}".replace("f64", "f32") == message


@pytest.mark.slow
def test_parts_built_on_a_mesh_stay_there():
    mesh = ee.make_mesh()
    group = ee.Group([ee.build(make, 4, mesh=mesh, key=KEY) for make in (WIDE, linear)], renumber=True)
    for batch_size in (8, 64):
        assert_close(ee.predict(group, rows(ROWS), batch_size=batch_size), looped(group, rows(ROWS)))
