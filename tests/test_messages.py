"""Messages for wrong inputs, word for word."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X, Y = jnp.ones((6, 2)), jnp.zeros((6, 1))
ADAM = optax.adam(1e-3)


def linear(key):
    return eqx.nn.Linear(2, 1, key=key)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def per_row(model, batch, key):
    x, y = batch
    errors = (jax.vmap(model)(x) - y) ** 2
    return jnp.mean(errors), {"errors": errors}


ENSEMBLE = ee.build(linear, 3, key=KEY)
MODELS = ENSEMBLE.unstack()


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


def fit(loss=mse, optimiser=ADAM, data=(X, Y), ensemble=ENSEMBLE, **options):
    options = {"steps": 1, "key": KEY} | options
    return ee.fit(ensemble, loss, optimiser, data, **options)


STATEFUL, STATE = ee.build(eqx.nn.make_with_state(Stateful), 3, key=KEY)
RBG = jax.random.key(0, impl="rbg")


# What is done wrong, and the error that it gives.
BAD = {
    "stack of different sizes": (
        lambda: ee.stack([*MODELS, eqx.nn.Linear(3, 1, key=KEY)]),
        "MemberMismatchError: "
        "`stack` needs models that differ only in their arrays; member 3 differs from member "
        "0.\n"
        "  at `.weight`: expected f32[1,2], got f32[1,3]\n"
        "  at `.in_features`: expected 2, got 3\n"
        "Models of different sizes cannot share one stacked Module: build one ensemble per size.",
    ),
    "stack of different floats": (
        lambda: ee.stack([eqx.nn.Dropout(0.1), eqx.nn.Dropout(0.2)]),
        "MemberMismatchError: "
        "`stack` needs models that differ only in their arrays; member 1 differs from member "
        "0.\n"
        "  at `.p`: expected 0.1, got 0.2\n"
        "Pass `promote_scalars=True` to stack Python floats that differ, or make them arrays.",
    ),
    "stack of different dtypes": (
        lambda: ee.stack([MODELS[0], jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODELS[1])]),
        "MemberMismatchError: "
        "`stack` needs models that differ only in their arrays; member 1 differs from member "
        "0.\n"
        "  at `.weight`: expected f32[1,2], got bf16[1,2]\n"
        "  at `.bias`: expected f32[1], got bf16[1]\n"
        "Nothing is promoted silently: cast the leaves to one dtype first.",
    ),
    "stack of one model": (
        lambda: ee.stack(MODELS[0]),
        "TypeError: "
        "`stack` needs a sequence of models (a list, tuple or iterator), got one `Linear`.\n"
        "Put the models in a list, one per member; a model that is already stacked needs no stacking.",
    ),
    "stack of nothing": (
        lambda: ee.stack([]),
        "ValueError: `stack` needs at least one model, got an empty sequence.",
    ),
    "from_stacked of a list of models": (
        lambda: ee.from_stacked([eqx.nn.MLP(2, 1, 4, 1, key=KEY)] * 3),
        "MemberMismatchError: "
        "`from_stacked` needs arrays that agree on the number of members along axis 0; got\n"
        "  1 members at `[0].layers[1].weight`, `[0].layers[1].bias`, `[1].layers[1].weight`, "
        "`[1].layers[1].bias` and 2 more\n"
        "  4 members at `[0].layers[0].weight`, `[0].layers[0].bias`, `[1].layers[0].weight`, "
        "`[1].layers[0].bias` and 2 more\n"
        "For a list of models, stack it first: `stack(models)`.",
    ),
    "concatenate of equal ids": (
        lambda: ee.concatenate([ENSEMBLE, ENSEMBLE[:1]]),
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[0].\n"
        "Build new members with `build(make, ids=..., key=key)`, or pass `renumber=True`.",
    ),
    "concatenate of models": (
        lambda: ee.concatenate(MODELS),
        "TypeError: "
        "`concatenate` needs ensembles, got a Linear at position 0.\n"
        "Make an ensemble of models with `stack([model, ...])`.",
    ),
    "ids that repeat": (
        lambda: ee.stack(MODELS, ids=[1, 2, 1]),
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[1].\n"
        "Give each member a different id.",
    ),
    "a member taken twice": (
        lambda: ENSEMBLE[[0, 0]],
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[0].\n"
        "A copy keeps the id of the member that it replaces: "
        "`equinox.tree_at(lambda e: e.stacked, ensemble, tree.take(ensemble.stacked, index))`.",
    ),
    "a member taken twice from the tree": (
        lambda: ee.tree.take(ENSEMBLE, [0, 0]),
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[0].\n"
        "A copy keeps the id of the member that it replaces: "
        "`equinox.tree_at(lambda e: e.stacked, ensemble, tree.take(ensemble.stacked, index))`.",
    ),
    "a member replaced by a copy": (
        lambda: ee.tree.replace(ENSEMBLE, [2], ENSEMBLE[:1]),
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[0].\n"
        "A copy keeps the id of the member that it replaces: "
        "`equinox.tree_at(lambda e: e.stacked, ensemble, tree.take(ensemble.stacked, index))`.",
    ),
    "trees of equal ids": (
        lambda: ee.tree.concatenate([ENSEMBLE, ENSEMBLE[:1]]),
        "ValueError: "
        "Members need different ids, because each member's random stream follows from its id; repeated: "
        "[0].\n"
        "To concatenate ensembles under new ids, use `concatenate(ensembles, renumber=True)`.",
    ),
    "ids of the wrong number": (
        lambda: ee.stack(MODELS, ids=[1, 2]),
        "MemberMismatchError: `Ensemble` needs one id per member: 3 members, 2 ids.",
    ),
    "member out of range": (
        lambda: ENSEMBLE[3],
        "IndexError: `Ensemble.__getitem__`: index 3 is out of range for 3 members; expected -3 to 2.",
    ),
    "mask of the wrong length": (
        lambda: ENSEMBLE[np.array([True, False])],
        "IndexError: `Ensemble.__getitem__`: a boolean mask needs one value per member: expected 3, got 2.",
    ),
    "an empty selection": (
        lambda: ENSEMBLE[[]],
        "ValueError: `Ensemble.__getitem__`: the index selects no member; an ensemble needs at least one.",
    ),
    "a name as an index": (
        lambda: ENSEMBLE["first"],
        "TypeError: "
        "`Ensemble.__getitem__`: expected an int, a slice, or a one-dimensional list or array of ints or "
        "bools, got 'first'.\n"
        "Use the position of a member, such as `0` or `[0, 2]`.",
    ),
    "build of zero members": (
        lambda: ee.build(linear, 0, key=KEY),
        "ValueError: `build` makes at least one member, got `num_members` of 0.",
    ),
    "build of a model": (
        lambda: ee.build(MODELS[0], 3, key=KEY),
        "TypeError: "
        "`build` needs a function that makes one member from a key, got a model, `Linear`.\n"
        "Write `build(lambda key: Model(..., key=key), num_members, key=key)`; a list of models goes to "
        "`stack`.",
    ),
    "build without a number": (
        lambda: ee.build(linear, key=KEY),
        "TypeError: "
        "`build` needs to know how many members to make: pass `num_members`, `ids`, `keys`, `zip` or "
        "`product`.",
    ),
    "build without a key": (
        lambda: ee.build(linear, 3),
        "TypeError: `build` needs one key: for example `key=jax.random.key(0)`.",
    ),
    "build with one key as keys": (
        lambda: ee.build(linear, keys=KEY),
        "TypeError: "
        "`build` needs one key per member as `keys`, shape (members,); got one single key.\n"
        "One key for all is passed with the number of members: `build(make, num_members, key=key)`.",
    ),
    "build with many keys as key": (
        lambda: ee.build(linear, 3, key=jax.random.split(KEY, 3)),
        "TypeError: "
        "`build` needs one key as `key`, got 3 keys.\n"
        "It makes the members' keys itself; keys of your own go to `build(make, keys=keys)`.",
    ),
    "build with an rbg key": (
        lambda: ee.build(linear, 3, key=RBG),
        "TypeError: "
        "`build` needs a threefry key, got one of 'rbg': other generators draw differently under "
        "`jax.vmap`, so a member would depend on its neighbours.\n"
        "Use `jax.random.key(seed, impl='threefry2x32')`.",
    ),
    "build with an integer as key": (
        lambda: ee.build(linear, 3, key=42),
        "TypeError: `build` needs one key, got the integer 42.\nMake a key of it: `jax.random.key(42)`.",
    ),
    "build with counts that disagree": (
        lambda: ee.build(linear, 4, keys=jax.random.split(KEY, 3)),
        "ValueError: `build` got different numbers of members: num_members: 4, keys: 3.",
    ),
    "build with strings": (
        lambda: ee.build(lambda key, act: linear(key), zip={"act": ["relu", "tanh"]}, key=KEY),
        "TypeError: "
        "`build` needs `zip['act']` to hold numbers, because members of one ensemble differ only in "
        "arrays; got ['relu', 'tanh'].\n"
        "Build one ensemble per choice.",
    ),
    "a list where members are expected": (
        lambda: ee.map_members(lambda m, x: m(x))(MODELS, X[0]),
        "TypeError: "
        "`map_members(<lambda>)` needs an argument with members, an `Ensemble` or an `Each`; got none.\n"
        "For a list of models, stack it first: `stack(models)`.",
    ),
    "no members at all": (
        lambda: ee.map_members(lambda x: x)(X),
        "TypeError: "
        "`map_members(<lambda>)` needs an argument with members, an `Ensemble` or an `Each`; got none.\n"
        "Mark inputs with one value per member: `Each(x)`; of a stacked Module, make one: `from_stacked(model)`.",
    ),
    "Each of a number": (
        lambda: ee.Each(3.0),
        "TypeError: "
        "`Each` needs at least one array with a members axis, got 3.0.\n"
        "Python numbers, functions and strings carry no axis: pass `jnp.asarray(values)`.",
    ),
    "Each of the wrong number": (
        lambda: ENSEMBLE(ee.Each(jnp.ones((4, 2)))),
        "MemberMismatchError: "
        "`Ensemble.__call__` needs arguments with the same number of members, got 3 and 4.\n"
        "An `Each` holds one value per member. Mark a batch that all members share as `Batch`.",
    ),
    "plan class": (
        lambda: ENSEMBLE.map(lambda m: m.bias, plan=ee.plan.Vmap),
        "TypeError: "
        "`plan` must be one of `Cores()`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`, got "
        "<class 'eqx_ensemble.plan._plans.Vmap'>.\n"
        "Pass an instance: `Vmap(...)`.",
    ),
    "plan name": (
        lambda: fit(plan="vmap"),
        "TypeError: "
        "`plan` must be one of `Cores()`, `Vmap()`, `Chunked(size)`, `Sequential()`, `Unrolled()`, got "
        "'vmap'.\n"
        "For example `plan.Vmap()`.",
    ),
    "chunks of zero": (
        lambda: ee.plan.Chunked(0),
        "ValueError: `plan.Chunked` needs `size` of at least 1, got 0.",
    ),
    "fit a list": (
        lambda: fit(ensemble=MODELS),
        "TypeError: "
        "`fit` needs an `Ensemble`, got a list.\n"
        "If it holds models, make an ensemble of them first: `stack(models)`.",
    ),
    "fit a model": (
        lambda: fit(ensemble=MODELS[0]),
        "TypeError: "
        "`fit` needs an `Ensemble`, got a Linear.\n"
        "`stack([model, ...])` makes one of models, `from_stacked(model)` of a model that is stacked "
        "already.",
    ),
    "fit epochs and steps": (
        lambda: fit(epochs=2),
        "TypeError: `fit` needs either `epochs` or `steps`, got both.",
    ),
    "fit neither": (
        lambda: ee.fit(ENSEMBLE, mse, ADAM, (X, Y), key=KEY),
        "TypeError: `fit` needs either `epochs` or `steps`, got neither.",
    ),
    "fit zero epochs": (
        lambda: ee.fit(ENSEMBLE, mse, ADAM, (X, Y), epochs=0, key=KEY),
        "ValueError: `fit` needs `epochs` of at least 1, got 0.",
    ),
    "fit without patience's validation": (
        lambda: fit(patience=3),
        "TypeError: `fit` needs `validation=` data with `patience`: members stop by their validation scores.",
    ),
    "fit an uncalled optimiser": (
        lambda: fit(optimiser=optax.adam),
        "TypeError: "
        "`fit` needs an optax optimiser, got the function `adam`.\n"
        "Call it first, for example `optax.adam(1e-3)`; or pass `hyper=` if `adam` makes an optimiser from "
        "each member's hyper-parameters.",
    ),
    "fit a string optimiser": (
        lambda: fit(optimiser="adam"),
        "TypeError: `fit` needs an optax optimiser, got 'adam'.",
    ),
    "fit an optimiser function that returns none": (
        lambda: fit(optimiser=lambda h: None, hyper={"lr": np.ones(3)}),
        "TypeError: `fit`: the optimiser function must return an optax optimiser, it returned `None`.",
    ),
    "fit unused hyper": (
        lambda: fit(hyper={"lr": np.ones(3)}),
        "TypeError: "
        "`fit` got `hyper`, but nothing uses it.\n"
        "Pass the optimiser as a function, `lambda h: optax.adam(h['lr'])`, or name a loss parameter "
        "`hyper`.",
    ),
    "fit hyper of the wrong length": (
        lambda: fit(optimiser=lambda h: optax.adam(h["lr"]), hyper={"lr": np.ones(4)}),
        "MemberMismatchError: `fit` needs one value per member in `hyper`; at `['lr']`: expected (3, ...), got (4,).",
    ),
    "fit hyper of one number": (
        lambda: fit(optimiser=lambda h: optax.adam(h["lr"]), hyper={"lr": 0.1}),
        "MemberMismatchError: `fit` needs one value per member in `hyper`; at `['lr']`: expected (3, ...), got ().\n"
        "One value for all members? Pass `jnp.full(3, value)`.",
    ),
    "fit loss that wants hyper": (
        lambda: fit(loss=lambda model, batch, key, hyper: 0.0),
        "TypeError: `fit`: the loss has a parameter `hyper`, but no `hyper=` was given.",
    ),
    "fit loss of two arguments": (
        lambda: fit(loss=lambda model, batch: 0.0),
        "TypeError: "
        "`fit` calls the loss of one member as `loss(model, batch, key)`; `<lambda>(model, batch)` cannot "
        "be called like that: too many positional arguments.",
    ),
    "fit a step in place of the loss": (
        lambda: fit(loss=lambda state, batch: (state, batch)),
        "TypeError: "
        "`fit` calls the loss of one member as `loss(model, batch, key)`; `<lambda>(state, batch)` cannot "
        "be called like that: too many positional arguments.\n"
        "A training step is called in a loop: `state, metrics = step(state, batch)`.",
    ),
    "fit loss that is none": (
        lambda: fit(loss=None),
        "TypeError: `fit` needs the loss of one member as a function `loss(model, batch, key)`, got None.",
    ),
    "fit loss per example": (
        lambda: fit(loss=lambda model, batch, key: (jax.vmap(model)(batch[0]) - batch[1])[:, 0] ** 2),
        "ValueError: "
        "Training needs a loss that reduces over the batch to one scalar; it returned shape (6,).\n"
        "Take the mean: `return jnp.mean(per_example)`.",
    ),
    "fit loss with aux unannounced": (
        lambda: fit(loss=lambda model, batch, key: (mse(model, batch, key), {})),
        "TypeError: "
        "Training needs a loss that returns one scalar, it returned (float32[], a dict).\n"
        "Set `has_aux=True` for auxiliary outputs after the value; pass `state=` for stateful members.",
    ),
    "fit loss without aux announced": (
        lambda: fit(has_aux=True),
        "TypeError: Training needs a loss that returns `(value, aux)`, it returned float32[].",
    ),
    "fit loss that returns nothing": (
        lambda: fit(loss=lambda model, batch, key: None),
        "TypeError: Training needs a loss that is a floating-point scalar, it returned `None`: is a `return` missing?",
    ),
    "fit NaN in validation": (
        lambda: fit(validation=(X, Y.at[0].set(jnp.inf))),
        "ValueError: "
        "`fit` needs validation scores that are finite; the array at `validation[1]` holds 1 NaN or infinite values, "
        "the first at index (0, 0), and no member has a finite score.\n"
        "Drop or impute those rows; or mask the values in the loss or in `score`, by `jnp.where` before they are used.",
    ),
    "fit different lengths": (
        lambda: fit(data=(X, Y[:4])),
        "ValueError: `fit` needs arrays of one length in `data`; got 6 rows at `data[0]`, 4 rows at `data[1]`.",
    ),
    "fit no rows": (
        lambda: fit(data=(X[:0], Y[:0])),
        "ValueError: `fit` needs at least one row in `data`, got none.",
    ),
    "fit no arrays": (
        lambda: fit(data=()),
        "TypeError: `fit` needs at least one array in `data`, got a tuple.",
    ),
    "fit a scalar": (
        lambda: fit(data=(X, jnp.ones(()))),
        "ValueError: `fit` needs arrays with one row per example in `data`; at `data[1]`: got shape ().",
    ),
    "fit string labels": (
        lambda: fit(data=(X, np.array(["a"] * 6))),
        "TypeError: `fit` needs arrays of numbers; at `data[1]`: dtype <U1.\nEncode labels as integers.",
    ),
    "fit lists": (
        lambda: fit(data=(X, [1.0] * 6)),
        "TypeError: "
        "`fit` needs arrays in its data; at `data[1][0]`: a float.\n"
        "Convert tables and lists first, for example `np.asarray(table)`.",
    ),
    "fit another byte order": (
        lambda: fit(data=(X, np.zeros((6, 1), ">f4"))),
        "TypeError: "
        "`fit` needs arrays in this machine's byte order; at `data[1]`: dtype >f4.\n"
        "Convert them: `x.astype(x.dtype.newbyteorder('='))`.",
    ),
    "predict another byte order": (
        lambda: (ee.predict(ENSEMBLE, np.zeros((2, 2), "f4")), ee.predict(ENSEMBLE, np.zeros((2, 2), ">f4"))),
        "TypeError: "
        "`predict` needs arrays in this machine's byte order; at `x`: dtype >f4.\n"
        "Convert them: `x.astype(x.dtype.newbyteorder('='))`.",
    ),
    "fit a function as data": (
        lambda: fit(data=lambda key: (X, X)),
        "TypeError: "
        "`fit` needs arrays in its data; at `data`: a function.\nCall it, and pass the arrays that it returns.",
    ),
    "fit a batch of zero": (
        lambda: fit(batch_size=0),
        "ValueError: `fit` needs `batch_size` of at least 1, got 0.",
    ),
    "fit rows out of range": (
        lambda: fit(rows=np.full((3, 4), 6)),
        "IndexError: `fit` needs `rows` from 0 to 5; 12 lie outside, the first is `rows[0, 0]` = 6.",
    ),
    "fit rows of one axis": (
        lambda: fit(rows=np.arange(4)),
        "TypeError: `fit` needs integer `rows` of shape (members, n), got int64 of shape (4,).",
    ),
    "fit rows of too few members": (
        lambda: fit(rows=np.zeros((2, 4), int)),
        "ValueError: `fit` needs `rows` of shape (3, n) with n of at least 1, got (2, 4).",
    ),
    "fit an unknown shuffle": (
        lambda: fit(shuffle="random"),
        "ValueError: `fit` needs `shuffle` to be `True`, `False` or `\"shared\"`, got 'random'.",
    ),
    "fit batch_size with an iterable": (
        lambda: fit(data=[(X, Y)], batch_size=2),
        "TypeError: `fit` takes `batch_size` only for data in arrays, not for an iterable of batches.",
    ),
    "fit an empty iterable": (
        lambda: fit(data=iter(())),
        "ValueError: `fit` needs at least one batch, but the iterable of batches is empty.",
    ),
    "fit an iterator for several epochs": (
        lambda: fit(data=iter([(X, Y)]), steps=None, epochs=2),
        "ValueError: "
        "`fit` iterates an iterable of batches once an epoch; with `epochs=2` got a list_iterator, "
        "which gives its batches only once.\n"
        "Pass an object that restarts each time (a list, a loader); or make it endless and give `steps`.",
    ),
    "fit a spent generator": (
        lambda: fit(data=iter([(X, Y)]), steps=2),
        "ValueError: "
        "`fit` found no batches in epoch 2: the iterable can be iterated only once, as a generator.\n"
        "Pass an object that restarts each time, or make the generator endless and give `steps`.",
    ),
    "fit nothing trainable": (
        lambda: fit(trainable=lambda leaf: False),
        "ValueError: "
        "`fit` found nothing to train: no stacked floating-point array is selected by `trainable`.\n"
        "Shared leaves are constants in training.",
    ),
    "fit stateful without state": (
        lambda: fit(ensemble=STATEFUL),
        "TypeError: "
        "`fit`: the members are stateful (for example they contain BatchNorm), but no `state` was given.\n"
        "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`.",
    ),
    "fit a state of the wrong kind": (
        lambda: fit(ensemble=STATEFUL, state={"a": 1}),
        "TypeError: "
        "`fit` needs `state` to be the stacked `equinox.nn.State` that `build` returned with the "
        "ensemble, got a dict.",
    ),
    "fit a stateful loss of three": (
        lambda: fit(ensemble=STATEFUL, state=STATE),
        "TypeError: "
        "`fit` calls the loss of one member as `loss(model, state, batch, key)`; `mse(model, batch, key)` "
        "cannot be called like that: too many positional arguments.",
    ),
    "fit without key": (
        lambda: fit(key=None),
        "TypeError: `fit` needs one key: for example `key=jax.random.key(0)`.",
    ),
    "predict a list": (
        lambda: ee.predict(MODELS, X),
        "TypeError: "
        "`predict` needs an `Ensemble`, got a list.\n"
        "If it holds models, make an ensemble of them first: `stack(models)`.",
    ),
    "predict stateful without state": (
        lambda: ee.predict(STATEFUL, X),
        "TypeError: "
        "`predict`: the members are stateful (for example they contain BatchNorm), but no `state` was "
        "given.\n"
        "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`.",
    ),
    "predict different lengths": (
        lambda: ee.predict(ENSEMBLE, (X, Y[:3])),
        "ValueError: `predict` needs arrays of one length in `x`; got 6 rows at `x[0]`, 3 rows at `x[1]`.",
    ),
    "predict batch of zero": (
        lambda: ee.predict(ENSEMBLE, X, batch_size=0),
        "ValueError: `predict` needs `batch_size` of at least 1, got 0.",
    ),
    "weighted sum of two weights": (
        lambda: ee.tree.weighted_sum(MODELS, [1, 2]),
        "ValueError: `tree.weighted_sum` needs one weight per tree; got 3 trees and 2 weights.",
    ),
    "Each of a list of models": (
        lambda: ee.Each(MODELS),
        "TypeError: "
        "`Each` needs one PyTree whose arrays carry the members axis, got a list of models.\n"
        "For a list of models, stack it first: `stack(models)`.",
    ),
    "two indices": (
        lambda: ENSEMBLE[0, 1],
        "TypeError: "
        "An ensemble is indexed along its members only, got (0, 1).\n"
        "Write `ensemble[[0, 1]]` for two members, `ensemble[0][1]` for a member of a nested ensemble.",
    ),
    "several gradients": (
        lambda: eqx.filter(eqx.filter_jit(lambda e, i: e[i])(ENSEMBLE, jnp.arange(2)), eqx.is_inexact_array)[:2],
        "TypeError: "
        "This `Ensemble` holds no member ids, as its ids were computed by a compiled function and then filtered out: "
        "index it with one integer, or take several members with `tree.take(tree, index)`.",
    ),
    "average of models": (
        lambda: ee.average_parameters(MODELS),
        "TypeError: "
        "`average_parameters` needs an `Ensemble`, got a list.\n"
        "If it holds models, make an ensemble of them first: `stack(models)`.",
    ),
    "average with two weights": (
        lambda: ee.average_parameters(ENSEMBLE, [1, 2]),
        "ValueError: `average_parameters` needs one weight per member.\n"
        "  expected shape (3,), got (2,)\nWeights are in the order of the members.",
    ),
    "weighted sum of two shapes": (
        lambda: ee.tree.weighted_sum([{"a": jnp.ones(3)}, {"a": jnp.ones(4)}], [1, 1]),
        "MemberMismatchError: "
        "`tree.weighted_sum` needs trees that differ only in their numbers; tree 1 differs from tree 0.\n"
        "  at `['a']`: expected f32[3], got f32[4]\n"
        "Nothing is broadcast silently: bring the leaves to one shape first.",
    ),
    "fit another way to diverge": (
        lambda: fit(on_diverge="ignore"),
        "ValueError: `fit` needs `on_diverge` to be one of 'freeze', 'revive', 'raise', got 'ignore'.",
    ),
    "fit aux of every row": (
        lambda: fit(loss=per_row, has_aux=True, batch_size=4),
        "ValueError: "
        "The loss's auxiliary output at `['errors']` has shape (4, 1) for one batch and (2, 1) for a smaller one; the "
        "history needs one shape.\n"
        "Reduce it over the batch, or choose a `batch_size` that divides the number of rows.",
    ),
    "fit aux of every row of an iterable": (
        lambda: fit(loss=per_row, has_aux=True, data=[(X, Y), (X[:2], Y[:2])], steps=2),
        "ValueError: "
        "The loss's auxiliary output at `['errors']` has shape (6, 1) for one batch and (2, 1) for a smaller one; the "
        "history needs one shape.\n"
        "Reduce it over the batch, or choose a `batch_size` that divides the number of rows.",
    ),
    "fit patience without an epoch": (
        lambda: fit(validation=(X, Y), patience=1, batch_size=3),
        "ValueError: "
        "`fit` cannot use `patience`: it counts validations, which are made at the end of every epoch, and the 1 steps "
        "asked for end within an epoch of 2.",
    ),
    "fit data of three for four": (
        lambda: fit(data=(ee.Each(jnp.ones((4, 6, 2))), Y)),
        "MemberMismatchError: `fit` needs one data set per member in the `Each` of `data`; at `data[0]`: expected "
        "(3, rows, ...), got (4, 6, 2).",
    ),
    "an attribute of the members": (
        lambda: ENSEMBLE.weight,
        "AttributeError: "
        "An `Ensemble` has no attribute `weight`. What its members hold is in `ensemble.stacked`, with the leading "
        "members axis, or in a single member, `ensemble[0]`.",
    ),
    "a function of the package as a method": (
        lambda: ENSEMBLE.predict(X),
        "AttributeError: "
        "An `Ensemble` has no method `predict`: it is a function of the package, `predict(ensemble, x)`.",
    ),
    "predict rows in lists": (
        lambda: ee.predict(ENSEMBLE, [[1.0, 2.0]]),
        "TypeError: "
        "`predict` needs arrays in its data; at `x[0][0]`: a float.\n"
        "Convert tables and lists first, for example `np.asarray(table)`.",
    ),
    "shared that is not there": (
        lambda: ee.build(linear, 3, shared=lambda m: m.trunk, key=KEY),
        "ValueError: "
        "`shared` must select nodes of one member as `equinox.tree_at` does, for example `lambda model: "
        "model.trunk`; it raised AttributeError: 'Linear' object has no attribute 'trunk'",
    ),
    "shared that differs": (
        lambda: ee.stack(MODELS, shared=lambda m: m.weight),
        "MemberMismatchError: "
        "`stack` keeps one copy of what members share; the shared array at `.weight` of number 1 differs "
        "from that of number 0.\n"
        "Leave it out of `shared` if it differs between members.",
    ),
    "aux of strings": (
        lambda: fit(loss=lambda m, b, k: (mse(m, b, k), {"name": "x"}), has_aux=True),
        "TypeError: Training needs auxiliary outputs that are arrays; at `['name']`: a str.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_message(unhooked, name):
    call, expected = BAD[name]
    with pytest.raises((TypeError, ValueError, IndexError, AttributeError)) as caught:
        call()
    # JAX adds a note on its own frames to what is raised while tracing.
    message = str(caught.value).split("\n--------------------\n")[0]
    assert f"{caught.type.__name__}: {message}" == expected


@pytest.mark.parametrize("x", [X[0], ee.Each(jnp.ones((3, 2)))], ids=["shared", "each"])
def test_predict_explains_what_a_row_is(x):
    with pytest.raises((TypeError, ValueError)) as caught:
        ee.predict(ENSEMBLE, x)
    assert "here a row has shape (). For a single example pass `x[None]`." in "\n".join(caught.value.__notes__)
