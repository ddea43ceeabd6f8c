"""Errors inside a user's functions: where they came from, with what shapes, and the likely cause."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X, Y = jnp.ones((6, 2)), jnp.zeros((6, 1))
LABELS = jnp.array([0, 1, 2, 0, 1, 2])
ADAM = optax.adam(1e-3)


def mlp(key):
    return eqx.nn.MLP(2, 1, 4, 1, key=key)


def classifier(key):
    return eqx.nn.MLP(2, 3, 4, 1, key=key)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def forgets_vmap(model, batch, key):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def takes_x_and_y(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def cross_entropy(model, batch, key):
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def decays(model, batch, key, hyper):
    return hyper["decay"] * mse(model, batch, key)


def shares_a_key(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(lambda x, k: model(x, key=k))(x, key) - y) ** 2)


def asks_for_what_is_not_there(model, batch, key):
    return jnp.mean(batch["x"])


class Normalised(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(2, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


def forgets_vmap_with_state(model, state, batch, key):
    out, state = model(batch[0], state)
    return jnp.mean(out), state


def forgets_the_axis(model, state, batch, key):
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))(batch[0], state)
    return jnp.mean(out), state


ENSEMBLE, CLASSIFIERS = ee.build(mlp, 3, key=KEY), ee.build(classifier, 3, key=KEY)
NORMALISED, STATE = ee.build(eqx.nn.make_with_state(Normalised), 3, key=KEY)
VMAP_STATE = 'jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)'

# name: loss, ensemble, targets, other options of `fit`, the arguments in the note, the likely cause
MISTAKES = {
    "no vmap": (
        forgets_vmap, ENSEMBLE, Y, {}, ["model: MLP", "batch: (f32[6,2], f32[6,1])", "key: key<fry>[]"],
        "`MLP` was called with f32[6,2], a whole batch. If it takes one example, write `jax.vmap(model)(x)`.",
    ),
    "no vmap, short names": (
        lambda m, b, k: jnp.mean(m(b[0]) - b[1]), ENSEMBLE, Y, {}, ["m: MLP", "b: (f32[6,2], f32[6,1])"],
        "`MLP` was called with f32[6,2], a whole batch. If it takes one example, write `jax.vmap(model)(x)`.",
    ),
    "x and y": (
        takes_x_and_y, ENSEMBLE, Y, {}, ["model: MLP", "x: (f32[6,2], f32[6,1])", "y: key<fry>[]"],
        "A loss is called as `loss(model, batch, key)`: `x` is the whole batch and `y` the random key. Take the batch "
        "apart inside: `x, y = batch`.",
    ),
    "float labels": (
        cross_entropy, CLASSIFIERS, LABELS.astype(jnp.float32), {}, ["batch: (f32[6,2], f32[6])"],
        "If `f32[6]` holds class labels, make them integers: `fit(..., (x, y.astype(int)), ...)`.",
    ),
    "boolean labels": (
        cross_entropy, CLASSIFIERS, LABELS.astype(bool), {}, ["batch: (f32[6,2], bool[6])"],
        "If `bool[6]` holds class labels, make them integers: `fit(..., (x, y.astype(int)), ...)`.",
    ),
    "one-hot labels": (
        cross_entropy, CLASSIFIERS, jax.nn.one_hot(LABELS, 2), {}, ["batch: (f32[6,2], f32[6,2])"],
        "If `f32[6,2]` holds one-hot labels, make them integers: `fit(..., (x, y.argmax(axis=-1)), ...)`.",
    ),
    "hyper of another name": (
        decays, ENSEMBLE, Y, {"hyper": {"decoy": np.ones(3, np.float32)}}, ["hyper: {'decoy': f32[]}"],
        "`hyper` has no 'decay'; it has 'decoy'. Did you mean 'decoy'?",
    ),
    "one key": (
        shares_a_key, ENSEMBLE, Y, {}, [],
        "`key` is one key for the whole batch. For one per example: "
        "`jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(key, len(x)))`.",
    ),
    "no vmap with state": (
        forgets_vmap_with_state, NORMALISED, Y, {"state": STATE}, ["model: Normalised", "state: State"],
        f"`Normalised` was called with f32[6,2], a whole batch. If it takes one example, write `{VMAP_STATE}`.",
    ),
    "no axis name": (
        forgets_the_axis, NORMALISED, Y, {"state": STATE}, [],
        "A layer needs the batch's axis by name: `jax.vmap(model, axis_name='batch', in_axes=(0, None), "
        "out_axes=(0, None))(x, state)`.",
    ),
    "features": (mse, CLASSIFIERS[:2], jnp.ones((6, 2)), {}, [], None),
    "a batch of another kind": (asks_for_what_is_not_there, ENSEMBLE, Y, {}, [], None),
}  # fmt: skip


def fit(loss=mse, ensemble=ENSEMBLE, y=Y, optimiser=ADAM, **options):
    return ee.fit(ensemble, loss, optimiser, (X, y), **({"steps": 1, "key": KEY} | options))


class FailsLate(eqx.Module):
    """Fails after its state has been used, which can be done once."""

    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(5, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


def with_a_state(model, state, batch, key):
    out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch[0], state)
    return jnp.mean(out), state


def note_of(call):
    """The last note of the error that the call raises; JAX adds one of its own."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  any error of a user's function
        call()
    notes = [note for note in getattr(caught.value, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in note]
    assert len(notes) == 1, notes
    return notes[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loss_with_a_mistake(unhooked, mistake):
    loss, ensemble, y, options, arguments, cause = MISTAKES[mistake]
    note = note_of(lambda: fit(loss, ensemble, y, **options))
    first, *lines = note.splitlines()
    code = loss.__code__
    place = f"{code.co_filename}:{code.co_firstlineno}"
    assert first == f"`fit` called `{loss.__name__}` ({place}) in training, for one member with"
    for argument in arguments:
        assert f"  {argument}" in lines
    given = [line for line in lines if not line.startswith("  ")]
    assert given == ([] if cause is None else [cause])


def test_a_score_with_a_mistake():
    validation = (X[:4], Y[:4])
    note = note_of(lambda: fit(validation=ee.train.Validation(validation, score=forgets_vmap, mode="min")))
    assert note.startswith("`fit` called `forgets_vmap` (")
    assert ") in validation, for one member with\n" in note
    assert "  batch: (f32[4,2], f32[4,1])\n" in note
    assert note.endswith("write `jax.vmap(model)(x)`.")


def test_a_step_with_a_mistake():
    state = ee.train.init(ENSEMBLE, ADAM, key=KEY)
    note = note_of(lambda: ee.train.make_step(forgets_vmap, ADAM)(state, (X, ee.Each(jnp.zeros((3, 6, 1))))))
    assert note.startswith("`train.make_step` called `forgets_vmap` (")
    assert "  batch: (f32[6,2], f32[6,1])\n" in note, "the batch is that of one member"


def test_a_model_that_fails_after_its_state_was_used():
    ensemble, state = ee.build(eqx.nn.make_with_state(FailsLate), 3, key=KEY)
    note = note_of(lambda: fit(with_a_state, ensemble, state=state))
    assert note.endswith("`FailsLate` was called with f32[2].")


def test_a_loss_of_any_arguments():
    note = note_of(lambda: fit(lambda *args: forgets_vmap(*args)))
    assert "  argument 1: (f32[6,2], f32[6,1])\n" in note
    assert note.endswith("write `jax.vmap(model)(x)`.")


def test_a_key_that_no_dictionary_takes():
    def loss(model, batch, key, hyper):
        raise KeyError([1])

    assert note_of(lambda: fit(loss, hyper={"a": np.ones(3, np.float32)})).endswith("`hyper` has no [1]; it has 'a'.")


@pytest.mark.parametrize("plan", [ee.plan.Sequential(), ee.plan.Chunked(2), ee.plan.Unrolled()], ids=repr)
def test_a_note_does_not_depend_on_the_plan(plan):
    assert note_of(lambda: fit(forgets_vmap, plan=plan)) == note_of(lambda: fit(forgets_vmap))


def test_run_time_type_checks_leave_notes_alone(request):
    hooked = note_of(lambda: fit(takes_x_and_y))
    request.getfixturevalue("unhooked")
    assert note_of(lambda: fit(takes_x_and_y)) == hooked


def test_a_model_of_whole_batches_that_is_right_is_no_suspect():
    """An example `(6,)` has the shape of the labels `(6,)` of the batch."""
    square = jnp.ones((6, 6))
    narrow = ee.build(lambda key: eqx.nn.Linear(5, 1, key=key), 2, key=KEY)
    note = note_of(lambda: ee.fit(narrow, mse, ADAM, (square, jnp.ones(6)), steps=1, key=KEY))
    assert note.endswith("`Linear` was called with f32[6].")


@pytest.mark.parametrize(
    ("optimiser", "expected"),
    [
        (lambda h: optax.adam(h["lr"]), "`hyper` has no 'lr'; it has 'rate'."),
        (lambda h: optax.sgd("0.1"), "It holds the string `step_size=''` where"),
        (lambda h: optax.chain(optax.clip(1.0), optax.adamw("0.1")), "It holds the string `step_size=''` where"),
    ],
)
def test_an_optimiser_with_a_mistake(optimiser, expected):
    note = note_of(lambda: fit(optimiser=optimiser, hyper={"rate": np.ones(3, np.float32)}))
    assert note.startswith("This happened ")
    assert "for one member with `hyper` {'rate': f32[]}." in note
    assert expected in note  # optax has already multiplied the string by -1, which leaves none of it


@pytest.mark.parametrize(
    ("optimiser", "expected"),
    [
        (optax.MultiSteps(ADAM, 2), "Pass `optax.MultiSteps(...).gradient_transformation()`."),
        (ADAM.init(eqx.filter(ENSEMBLE.stacked, eqx.is_array)), "got a tuple of 9 arrays: an optimiser's state?"),
    ],
    ids=["MultiSteps", "state"],
)
@pytest.mark.parametrize("call", [fit, lambda optimiser: ee.train.init(ENSEMBLE, optimiser, key=KEY)])
def test_what_is_no_optimiser(unhooked, optimiser, expected, call):
    with pytest.raises(TypeError) as caught:
        call(optimiser=optimiser)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("make", [functools.partial(eqx.nn.MLP, 2, 1, 4, 1), eqx.nn.MLP], ids=["partial", "class"])
def test_a_constructor_that_takes_its_key_by_name(unhooked, make):
    with pytest.raises(
        TypeError, match=r"`build` makes a member as `make\(key\)`.*\n.*`lambda key: MLP\(\.\.\., key=key\)`"
    ):
        ee.build(make, 3, key=KEY)


def test_constructors_that_can_be_called():
    """A decorator may pass on other arguments than its own: the wrapped function's signature shows nothing."""

    @functools.wraps(eqx.nn.MLP)
    def decorated(key):
        return mlp(key)

    partial = functools.partial(lambda size, key, rate=0.5: eqx.nn.Linear(2, size, key=key), 1)
    for make in (decorated, partial, lambda *args: mlp(*args)):
        assert ee.build(make, 2, key=KEY).num_members == 2


def test_a_label_out_of_range_is_no_matter_of_the_learning_rate():
    with pytest.warns(UserWarning, match="3 member") as caught:
        fit(cross_entropy, CLASSIFIERS, LABELS.at[3].set(3))
    message = str(caught[0].message)
    assert "not finite before any update" in message
    assert "learning rate or gradient clipping" not in message
    assert "`data[1]` holds integers from 0 to 3: a class label beyond a model's outputs makes the loss NaN." in message


def test_a_divergence_by_the_learning_rate_is_one():
    with pytest.warns(UserWarning, match="a smaller learning rate or gradient clipping often helps") as caught:
        fit(cross_entropy, CLASSIFIERS, LABELS, optimiser=optax.sgd(1e38), steps=4)
    assert "before any update" not in str(caught[0].message)
