"""Joint ensembles: against their sub-members as dense models, and formulas written out in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.efficient import (
    as_members,
    batch_ensemble,
    masksembles,
    members,
    mimo,
    packed_ensemble,
    tabm,
)

from ..factories import Attention, assert_close

KEY = jax.random.key(3)
X = np.asarray(jax.random.normal(jax.random.key(4), (7, 12)))
MLP = eqx.nn.MLP(12, 2, 8, 2, key=jax.random.key(5))
KINDS = {
    "batch_ensemble": batch_ensemble,
    "signs": lambda model, k, **options: batch_ensemble(model, k, factors="signs", **options),
    "tabm": tabm,
    "tabm normal": lambda model, k, **options: tabm(model, k, factors="normal", **options),
    "mimo": mimo,
    "masksembles": masksembles,
    "packed": packed_ensemble,
    "grouped": lambda model, k, **options: packed_ensemble(model, k, gamma=2, **options),
}


class Convolutions(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 6, 2, key=keys[0]),
            eqx.nn.Conv2d(6, 6, 2, padding="SAME", use_bias=False, key=keys[1]),
            eqx.nn.Conv2d(6, 4, (1, 2), key=keys[2]),
            eqx.nn.Linear(16, 2, key=keys[3]),
        ]

    def __call__(self, x):
        x = x.reshape(1, 3, 4)
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x.reshape(-1))


CONVOLUTIONS = Convolutions(jax.random.key(6))


def weights(tree):
    return sum(x.size for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))


def rows_of(joint, x=X):
    """Predictions `(submembers, rows, out)`."""
    return np.moveaxis(np.asarray(jax.jit(jax.vmap(joint))(x)), 1, 0)


def test_numbers_of_weights():
    """Those of the papers' formulas for 10-64-64-3 and four sub-members."""
    model = eqx.nn.MLP(10, 3, 64, 2, key=KEY)
    count = lambda convert: weights(eqx.filter_eval_shape(lambda: convert(model, 4, key=KEY)))
    assert weights(model) == 5059
    assert count(batch_ensemble) == 5059 - 131 + 4 * (138 + 2 * 131) == 6528
    assert count(mimo) == 7564
    assert count(masksembles) == 5059
    assert count(tabm) == 4736 + 4 * (74 + 2 * 128) + 4 * 195
    assert count(packed_ensemble) == 4 * (11 * 32 + 33 * 32 + 33 * 3) == 6028
    assert count(lambda model, k, key: members(batch_ensemble(model, k, key=key))) == 4 * 5059 == 20236


FAST = [(MLP, "batch_ensemble"), (MLP, "mimo"), (CONVOLUTIONS, "grouped")]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) in FAST else pytest.mark.slow, id=f"{kind} {name}")
        for kind, model in {"mlp": MLP, "convolutions": CONVOLUTIONS}.items()
        for name in KINDS
    ],
)
def test_a_joint_ensemble_is_its_members_taken_out(model, name):
    @eqx.filter_jit
    def both(key):
        joint = KINDS[name](model, 3, key=key)
        dense = members(joint)
        return jax.vmap(joint)(X), jnp.stack([jax.vmap(member)(X) for member in dense]), dense

    got, expected, dense = both(KEY)
    got = np.moveaxis(np.asarray(got), 1, 0)
    assert got.shape == (3, 7, 2)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)  # other orders of sums
    for other in range(1, 3):
        assert np.abs(got - np.roll(expected, other, axis=0)).max() > 1e-2, "sub-members are alike"
    if "packed" not in name and "grouped" not in name:
        assert jax.tree.structure(dense[0]) == jax.tree.structure(model)


@pytest.mark.parametrize("convert", [batch_ensemble, masksembles])
def test_convolutions_in_groups(convert):
    model, x = eqx.nn.Conv1d(4, 6, 2, groups=2, key=KEY), X[:4]

    @eqx.filter_jit
    def both(key):
        joint = convert(model, 2, where=eqx.nn.Conv, key=key)
        return joint(x), jnp.stack([member(x) for member in members(joint)])

    got, expected = both(KEY)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_batch_ensemble_is_the_papers_formula():
    joint = batch_ensemble(MLP, 3, key=KEY)
    for i, got in enumerate(rows_of(joint)):
        h = X.astype(np.float64)
        for j, (plain, layer) in enumerate(zip(MLP.layers, joint.model.layers, strict=True)):
            w = np.asarray(plain.weight, np.float64)
            h = ((h * np.asarray(layer.in_factors)[i]) @ w.T) * np.asarray(layer.out_factors)[i] + np.asarray(
                plain.bias
            )
            h = np.maximum(h, 0) if j < 2 else h
        np.testing.assert_allclose(got, h, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(joint.model.layers[1].bias[2], MLP.layers[1].bias)


@pytest.mark.parametrize(
    "model", [MLP, pytest.param(CONVOLUTIONS, marks=pytest.mark.slow)], ids=["mlp", "convolutions"]
)
def test_unit_factors_are_the_model(model):
    """To the order of sums: factors of 1 and a bias that is added later change no bit."""
    with pytest.warns(UserWarning, match="stay alike"):
        joint = batch_ensemble(model, 3, factors="ones", key=KEY)
    expected = np.asarray(jax.vmap(model)(X))
    for got in rows_of(joint):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2 * np.finfo(np.float32).eps * np.abs(expected).max())
    one = batch_ensemble(model, 1, factors="ones", key=KEY)
    np.testing.assert_array_equal(one(X[0])[0], model(X[0]))
    assert_close(members(one)[0], model, 0.0)


def test_factors_have_their_distribution_and_follow_from_the_key():
    wide = eqx.nn.Linear(500, 400, key=KEY)
    convert = eqx.filter_jit(lambda k, factors: batch_ensemble(wide, k, factors=factors, key=KEY).model)
    normal, fewer = convert(4, "normal"), convert(2, "normal")
    for factors, of_two in ((normal.in_factors, fewer.in_factors), (normal.out_factors, fewer.out_factors)):
        scaled = (np.asarray(factors) - 1) / 0.5
        assert abs(scaled.mean()) < 5.5 / np.sqrt(scaled.size)
        assert abs(scaled.std() - 1) < 5.5 / np.sqrt(2 * scaled.size)
        np.testing.assert_array_equal(of_two, factors[:2])
    assert (
        abs(np.corrcoef(np.asarray(normal.in_factors)[:, :400].ravel(), np.asarray(normal.out_factors).ravel())[0, 1])
        < 0.14
    )
    assert np.abs(np.corrcoef(normal.in_factors)[np.triu_indices(4, 1)]).max() < 5.5 / np.sqrt(500)
    signs = np.asarray(convert(4, "signs").in_factors)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5.5 / np.sqrt(signs.size)


def test_tabm_starts_as_the_authors_do():
    joint = tabm(MLP, 16, key=KEY)
    first, second, head = joint.model.layers
    assert set(np.unique(first.in_factors)) == {-1.0, 1.0}
    for ones in (first.out_factors, second.in_factors, second.out_factors):
        assert (np.asarray(ones) == 1).all()
    np.testing.assert_array_equal(first.bias, np.broadcast_to(MLP.layers[0].bias, (16, 8)))
    heads = np.asarray(head.layer.weight)
    assert heads.shape == (16, 2, 8)
    assert len(np.unique(heads)) == heads.size
    assert 0.9 < np.abs(heads).max() * np.sqrt(8) <= 1
    normal = np.asarray(
        tabm(eqx.nn.MLP(300, 1, 4, 1, key=KEY), 16, factors="normal", key=KEY).model.layers[0].in_factors
    )
    assert abs(normal.mean()) < 5.5 / np.sqrt(normal.size)
    assert abs(normal.std() - 1) < 5.5 / np.sqrt(2 * normal.size)


def test_mimo_is_one_network_with_all_inputs_and_outputs():
    joint = mimo(MLP, 3, key=KEY)
    inputs = jax.random.normal(jax.random.key(1), (3, 12))
    first, middle, last = joint.model.layers
    h = jax.nn.relu(first.layer(inputs.reshape(-1)))
    expected = last.layer(jax.nn.relu(middle(h))).reshape(3, 2)
    call = jax.jit(lambda inputs: joint(ee.Each(inputs)))
    np.testing.assert_allclose(call(inputs), expected, rtol=1e-5, atol=1e-6)
    sizes = [e.outvars[0].aval.size for e in jaxpr_dots(jax.make_jaxpr(lambda x: joint(ee.Each(x)))(inputs).jaxpr)]
    assert sizes == [8, 8, 6], "more than one forward pass"
    meets = jax.jacobian(call)(inputs)
    assert all(np.abs(meets[i, :, j]).max() > 1e-3 for i in range(3) for j in range(3))
    apart = jax.jacobian(lambda x: batch_ensemble(MLP, 3, key=KEY)(ee.Each(x)))(inputs)
    assert all((np.abs(apart[i, :, j]).max() > 1e-3) == (i == j) for i in range(3) for j in range(3))


def jaxpr_dots(jaxpr):
    """The matrix products of a program, those inside of calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from jaxpr_dots(inner)


@pytest.mark.parametrize(
    ("num_masks", "scale"),
    [
        pytest.param(n, scale, marks=() if (n, scale) == (4, 2.0) else pytest.mark.slow)
        for n in (3, 4, 8)
        for scale in (1.0, 1.5, 2.0, 3.0, 6.0)
    ],
)
def test_masks_keep_the_widths_and_overlaps_of_the_paper(num_masks, scale):
    """c = m s (1 - (1 - 1/s)^n), every feature kept, and intersection over union 1 / (2s - 1)."""
    width, model = 240, eqx.nn.Linear(240, 1, key=KEY)
    convert = eqx.filter_jit(lambda key: masksembles(model, num_masks, scale=scale, where=eqx.nn.Linear, key=key))
    joint = convert(KEY)
    masks = np.asarray(joint.model.mask)
    assert masks.any(axis=0).all()
    kept = set(masks.sum(axis=1))
    assert len(kept) == 1
    assert abs(kept.pop() * scale * (1 - (1 - 1 / scale) ** num_masks) - width) <= max(scale * num_masks / 2, 1)
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    overlap = np.mean([(a & b).sum() / (a | b).sum() for a, b in pairs])
    assert abs(overlap - 1 / (2 * scale - 1)) < 0.04


@pytest.mark.slow
def test_masks_follow_from_the_key_alone():
    make = lambda key: masksembles(MLP, 4, scale=3.0, key=key)
    masks = lambda joint: [joint.model.layers[i].mask for i in (1, 2)]
    one = masks(make(KEY))
    for first, second in zip(one, jax.jit(lambda key: masks(make(key)))(KEY), strict=True):
        np.testing.assert_array_equal(first, second)
    assert (one[0] != one[1]).any()
    assert (one[0] != masks(make(jax.random.key(9)))[0]).any()
    many = ee.build(make, 2, key=KEY)
    assert many.stacked.model.layers[1].mask.shape == (2, 4, 8)
    assert len(jax.tree.leaves(eqx.filter(make(KEY), eqx.is_inexact_array))) == 6


def test_a_masked_member_is_a_network_without_the_features():
    joint = masksembles(MLP, 3, key=KEY)
    for i, got in enumerate(rows_of(joint)):
        first, second = (np.asarray(joint.model.layers[j].mask[i]) for j in (1, 2))
        a, b, c = MLP.layers
        h = np.maximum(X @ np.asarray(a.weight)[first].T + np.asarray(a.bias)[first], 0)
        h = np.maximum(h @ np.asarray(b.weight)[second][:, first].T + np.asarray(b.bias)[second], 0)
        np.testing.assert_allclose(
            got, h @ np.asarray(c.weight)[:, second].T + np.asarray(c.bias), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("width", "num_submembers", "alpha", "gamma", "expected"),
    [(64, 4, 2, 1, 32), (64, 4, 2, 2, 32), (15, 4, 2, 2, 8), (15, 4, 2, 1, 8), (7, 3, 1.5, 4, 4), (10, 4, 2, 2, 6)],
)
def test_packed_widths_are_divisible(width, num_submembers, alpha, gamma, expected):
    model = eqx.nn.MLP(15, 5, width, 2, key=KEY)

    def shapes():
        joint = packed_ensemble(model, num_submembers, alpha=alpha, gamma=gamma, key=KEY)
        return members(joint).stacked, joint(jnp.ones(15))

    dense, out = eqx.filter_eval_shape(shapes)
    assert [layer.weight.shape[1:] for layer in dense.layers] == [(expected, 15), (expected, expected), (5, expected)]
    assert out.shape == (num_submembers, 5)


@pytest.mark.slow
def test_groups_are_blocks():
    joint = packed_ensemble(MLP, 2, gamma=4, key=KEY)
    blocks = np.asarray(members(joint)[0].layers[1].weight).reshape(4, 2, 4, 2)
    assert all((np.abs(blocks[i, :, j]).max() > 0) == (i == j) for i in range(4) for j in range(4))


def test_which_layers_are_converted():
    shapes = lambda *args, **options: eqx.filter_eval_shape(lambda: batch_ensemble(*args, key=KEY, **options))
    by_path = shapes(MLP, 2, where=lambda m: m.layers[1])
    assert [type(layer).__name__ for layer in by_path.model.layers] == ["Linear", "RankOne", "Linear"]
    by_type = shapes(CONVOLUTIONS, 2, where=eqx.nn.Conv)
    assert [type(layer).__name__ for layer in by_type.model.layers] == ["RankOne"] * 3 + ["Linear"]
    frozen = shapes(eqx.nn.Sequential([ee.train.Frozen(MLP), eqx.nn.Linear(2, 2, key=KEY)]), 2)
    assert [type(layer).__name__ for layer in frozen.model.layers] == ["Frozen", "RankOne"]


@pytest.mark.slow
def test_attention():
    attention = Attention(KEY)
    joint = batch_ensemble(attention, 2, key=KEY)
    x, key = jnp.asarray(np.resize(X, 25)), jax.random.key(8)
    got = eqx.nn.inference_mode(joint)(x, key=key)
    expected = [eqx.nn.inference_mode(member)(x, key=key) for member in members(joint)]
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-4, atol=1e-6)
    assert np.abs(got[0] - got[1]).max() > 1e-2


@pytest.mark.slow
def test_scalar_inputs_and_outputs():
    model = eqx.nn.MLP("scalar", "scalar", 4, 1, key=KEY)
    for name, convert in KINDS.items():
        if name != "signs":
            joint = convert(model, 3, key=KEY)
            got = joint(jnp.float32(0.7))
            assert got.shape == (3,), name
            np.testing.assert_allclose(got, [member(jnp.float32(0.7)) for member in members(joint)], rtol=1e-5)


@pytest.mark.parametrize("name", ["batch_ensemble", "tabm", "mimo", "masksembles", "grouped"])
def test_half_precision_stays(name):
    model = eqx.nn.MLP(4, 2, 6, 2, dtype=jnp.bfloat16, key=KEY)

    def outputs():
        joint = KINDS[name](model, 2, key=KEY)
        return joint(jnp.ones(4, jnp.bfloat16)), eqx.filter(joint, eqx.is_array), members(joint).stacked

    found = {str(x.dtype) for x in jax.tree.leaves(eqx.filter_eval_shape(outputs)) if hasattr(x, "dtype")}
    assert found <= {"bfloat16", "bool"}


def test_each_submember_has_its_dropout():
    model = eqx.nn.Sequential([eqx.nn.Linear(12, 30, key=KEY), eqx.nn.Dropout(0.5)])
    joint = batch_ensemble(model, 3, key=KEY)
    dropped = np.asarray(joint(X[0], key=KEY)) == 0
    assert all((dropped[i] != dropped[j]).any() for i in range(3) for j in range(i))
    fewer = batch_ensemble(model, 2, key=KEY)(X[0], key=KEY)
    np.testing.assert_allclose(fewer, joint(X[0], key=KEY)[:2], rtol=1e-6)
    chosen = ee.Each(jax.random.split(KEY, 3)[np.zeros(3, int)])
    same = np.asarray(joint(X[0], key=chosen)) == 0
    assert (same[0] == same[1]).all()
    layers = [eqx.nn.Linear(12, 30, key=KEY), eqx.nn.Dropout(0.5), eqx.nn.Linear(30, 2, key=KEY)]
    one_pass = mimo(eqx.nn.Sequential(layers), 3, key=KEY)
    sizes = [e.outvars[0].aval.size for e in jaxpr_dots(jax.make_jaxpr(lambda x: one_pass(x, key=KEY))(X[0]).jaxpr)]
    assert sizes == [30, 6]


def test_predictions_as_members():
    make = lambda key: tabm(eqx.nn.MLP(12, 2, 8, 1, key=key), 3, key=key)
    ensemble = ee.build(make, 2, key=KEY)[[1, 0]]
    predictions = ee.predict(ensemble, X)
    assert predictions.shape == (2, 7, 3, 2)
    flat, dense = as_members(predictions), members(ensemble)
    np.testing.assert_allclose(flat, ee.predict(dense, X), rtol=1e-4, atol=1e-6)
    combined = ee.predict(ensemble, X, combine=lambda x: ee.combine.mixture(as_members(x)), batch_size=4)
    np.testing.assert_allclose(combined, ee.combine.mixture(flat), rtol=1e-5)


def test_inputs_of_their_own():
    joint = batch_ensemble(MLP, 3, key=KEY)
    got = jax.vmap(lambda xs: joint(ee.Each(xs)))(jnp.stack([X, 2 * X, -X], axis=1))
    each = [rows_of(joint, x)[i] for i, x in enumerate((X, 2 * X, -X))]
    np.testing.assert_allclose(np.moveaxis(got, 1, 0), np.stack(each), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="sizes"):
        joint(ee.Each(jnp.ones((2, 12))))


class Twice(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, size=8):
        self.first = self.second = eqx.nn.Linear(size, size, key=KEY)
        self.out = eqx.nn.Linear(3, 5, key=KEY)

    def __call__(self, x):
        return x


class Positive(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return jax.nn.relu(super().__call__(x))


def _normed():
    return eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=KEY), eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 2, key=KEY)])


STACKED = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(jax.random.split(KEY))
GROUPED = eqx.nn.Sequential([eqx.nn.Conv1d(2, 2, 1, groups=2, key=KEY), eqx.nn.Linear(2, 2, key=KEY)])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: batch_ensemble(ee.stack([MLP]), 2, key=KEY), TypeError, "converts one model, got an `Ensemble`"),
        (lambda: batch_ensemble(3, 2, key=KEY), TypeError, "Equinox Module that can be called, got an int"),
        (lambda: tabm(batch_ensemble(MLP, 2, key=KEY), 2, key=KEY), TypeError, "a model without sub-members"),
        (lambda: mimo(tabm(MLP, 2, key=KEY).model, 2, key=KEY), TypeError, "a model without sub-members"),
        (lambda: batch_ensemble(MLP, 0, key=KEY), ValueError, "`num_submembers` of at least 1, got 0"),
        (lambda: batch_ensemble(MLP, 2, key=None), TypeError, "needs one key"),
        (lambda: batch_ensemble(MLP, 2, std=-1, key=KEY), ValueError, "`std` to be at least 0"),
        (lambda: batch_ensemble(MLP, 2, factors="one", key=KEY), ValueError, "`factors` to be one of"),
        (lambda: batch_ensemble(MLP, 2, where=eqx.nn.Conv, key=KEY), ValueError, "a linear layer or convolution; 0"),
        (lambda: batch_ensemble(MLP, 2, where="layers", key=KEY), TypeError, "`where` to be a function"),
        (lambda: batch_ensemble(MLP, 2, where=lambda m: m.layers[0].weight, key=KEY), TypeError, "got an ArrayImpl"),
        (lambda: batch_ensemble(Twice(), 2, key=KEY), ValueError, "weights are their own"),
        (lambda: batch_ensemble(MLP, 2, where=lambda m: [m.layers[0]] * 2, key=KEY), ValueError, "each layer once"),
        (lambda: batch_ensemble(eqx.nn.WeightNorm(eqx.nn.Linear(2, 2, key=KEY)), 2, key=KEY), ValueError, "WeightNorm"),
        (
            lambda: batch_ensemble(STACKED, 2, key=KEY),
            ValueError,
            r"a weight of 2 axes, got f\d+\[2,3,2\]",
        ),
        (
            lambda: batch_ensemble(eqx.nn.Linear(2, 3, dtype=jnp.complex64, key=KEY), 2, key=KEY),
            TypeError,
            "real floating-point weights",
        ),
        (lambda: batch_ensemble(Positive(2, 3, key=KEY), 2, key=KEY), TypeError, "other subclasses; got a Positive"),
        (lambda: masksembles(Positive(2, 3, key=KEY), where=Positive, key=KEY), TypeError, "got a Positive"),
        (lambda: tabm(eqx.nn.Linear(2, 3, key=KEY), key=KEY), ValueError, "at least 2 linear layers"),
        (lambda: masksembles(MLP, scale=0.5, key=KEY), ValueError, "`scale` to be at least 1"),
        (lambda: packed_ensemble(MLP, 2, alpha=0, key=KEY), ValueError, "`alpha` above 0"),
        (lambda: packed_ensemble(MLP, 2, gamma=1.5, key=KEY), TypeError, "integer `gamma`"),
        (lambda: packed_ensemble(_normed(), 2, key=KEY), ValueError, r"at `.layers\[1\].weight`: got f\d+\[4\]"),
        (
            lambda: packed_ensemble(Twice(), 2, where=lambda m: [m.first, m.out], key=KEY),
            ValueError,
            "weights are their own",
        ),
        (
            lambda: packed_ensemble(MLP, 2, where=lambda m: m.layers[::-1], key=KEY),
            ValueError,
            "layer 1 takes 8 features, and the layer before it returns 2|a chain",
        ),
        (
            lambda: mimo(GROUPED, 2, key=KEY),
            ValueError,
            "`groups=2`",
        ),
        (lambda: members(MLP), TypeError, "needs a `JointEnsemble`, got a MLP"),
        (lambda: members(ee.stack([MLP])), TypeError, "needs a `JointEnsemble`, got a MLP"),
        (lambda: as_members(jnp.ones((3, 4))), ValueError, r"got shapes \[\(3, 4\)\]"),
    ],
)  # fmt: skip
def test_bad_arguments(unhooked, call, error, message):
    with pytest.raises(error, match=message):
        call()
