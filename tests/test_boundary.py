"""What every array function does with its arguments: stated once, for all functions of `array_calls.py`."""

import functools as ft
import inspect
import itertools
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from eqx_ensemble import combine, scores
from eqx_ensemble._boundary import _rows
from eqx_ensemble._boundary._arguments import Arguments

from .array_calls import CALLS, NAMES, arguments_of, call, function_of
from .census import BAD_OF_ARRAYS
from .marking import slow_but

KEPT, WHOLE = np.array([True, True, False, True, True, True]), np.array([1, 2, 0, 1, 3, 1])
ROOMS = ("acquire", "calibrate", "combine", "conformal", "scores", "uncertainty")
ARRAYS = [name for name in NAMES if name.partition(".")[0] in ROOMS and ".weights." not in name]
WEIGHTED = [name for name in ARRAYS if "weights" in arguments_of(name)]
TAKING = [name for name in ARRAYS if "row_weights" in arguments_of(name)]
# What is drawn depends on the number of rows or of members.
RANDOM = {name for name in ARRAYS if arguments_of(name).get("key") is not None} - {"acquire.batch_bald", "scores.pit"}
# With so few rows or members, values that are the same for other weights.
COARSE = {"acquire.batch_probability_of_improvement", "uncertainty.interval", "uncertainty.q_statistic"}
COARSE |= {f"scores.{name}" for name in ("accuracy", "coverage", "fpr_at_tpr", "mce", "set_size", "width")}
# Of each kind one that is tested by default: a mean, a root, bins, groups, ranks, a fit, a quantile, a pair.
QUICK = {"acquire.bald", "calibrate.variance", "combine.median", "combine.mixture", "scores.brier", "scores.by_group"}
QUICK |= {
    "scores.bootstrap",
    "scores.crps",
    "scores.ece",
    "scores.auroc",
    "scores.rmse",
    "uncertainty.gaussian_mixture_interval",
}
NOISE = pytest.mark.filterwarnings("ignore:.*(no minimum|too few|unbounded|the sets have|takes logits|share of rows)")


def each(names, quick=QUICK):
    """The names, slow but for some of them."""
    return pytest.mark.parametrize("name", slow_but(quick, names))


@ft.cache
def signature_of(name):
    """What the annotations of a function say."""
    return Arguments(inspect.signature(inspect.unwrap(function_of(name))))


def axis_of(name, argument, kind):
    """The axis of members or of rows of an argument, or `None`."""
    of = signature_of(name)
    axes = {"weights": ("members",), "row_weights": (of.row_axes[-1],)}.get(argument)
    axes = axes or (of.arrays[argument].axes if argument in of.arrays else ())
    wanted = "members" if kind == "members" else of.row_axes[-1]
    return axes.index(wanted) if wanted in axes else None


def along(name, kind, change, arguments=None):
    """The arguments after `change` of all that have the axis, which it gets first."""
    changed = dict(arguments or arguments_of(name))
    for argument, x in changed.items():
        axis = axis_of(name, argument, kind)
        if axis is not None and x is not None:
            changed[argument] = np.moveaxis(change(np.moveaxis(np.asarray(x), axis, 0)), 0, axis)
    return changed


def spoilt(name, kind, where, value=np.nan, arguments=None):
    """The arguments with `value`, or what is no label, at places that do not count."""

    def spoil(x):
        x = x.copy()
        if x.dtype != bool:
            x[where] = -7 if x.dtype.kind == "i" else value
        return x

    arguments = arguments or arguments_of(name)
    changed = along(name, kind, spoil, {key: x for key, x in arguments.items() if not key.endswith("weights")})
    return arguments | changed


def assert_the_same(given):
    """For whatever is at places that do not count, bit for bit."""
    for value in (np.nan, -1.0):
        for got, want in zip(given(value), given(0.5), strict=True):
            np.testing.assert_array_equal(got, want)


def numbers(result, *, whole=True):
    """The arrays of a result; without `whole`, those of floats."""
    found = [np.asarray(x) for x in jax.tree.leaves(result) if hasattr(x, "dtype") and x.dtype != bool]
    return [x for x in found if whole or np.issubdtype(x.dtype, np.floating)]


def assert_close(got, want, *, rtol=2e-5, atol=2e-6, **which):
    for one, other in zip(numbers(got, **which), numbers(want, **which), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def test_every_public_function_is_here():
    elsewhere = {"tree.polyak", "scores.per_member", "combine.greedy", "resample.from_splits"}
    elsewhere |= {"methods.distillation.targets", "methods.distillation.split_targets"}  # of ensembles, or functions
    for room, calls in CALLS.items():
        prefix = room.__name__.removeprefix("eqx_ensemble.")
        names = getattr(room, "__all__", vars(room))
        public = {name for name in names if inspect.isfunction(getattr(room, name))}
        assert {f"{prefix}.{name}" for name in public - set(calls)} <= elsewhere


def test_signatures_show_the_names_of_kinds():
    assert "(logits: Logits, labels: Labels, *, weights: WeightsOfRows | None" in str(inspect.signature(scores.nll))


# Weights of members.


@NOISE
@each([name for name in WEIGHTED if name not in RANDOM and not name.startswith(("calibrate", "conformal"))])
def test_weights_count_members(name):
    def given(index, weights=None, arguments=None):
        arguments = (arguments or arguments_of(name)) | {"weights": None}
        taken = along(name, "members", lambda x: x[np.array(index)], arguments)
        return call(name, **taken | {"weights": weights})

    broken = spoilt(name, "members", [2])
    pairs = [
        (given([0, 0, 1], np.ones(3)), given([0, 1, 2], np.array([2, 1, 0]), broken)),
        (given([2, 0, 1], np.array([3, 1, 2])), given([0, 1, 2], 1e-60 * np.array([1, 2, 3]))),
        (given([0, 1, 2]), given([0, 1, 2], np.full(3, 0.1))),
        (given([1]), given([0, 1, 2], np.array([0, 1, 0]))),
    ]
    for got, want in pairs:
        assert_close(got, want, rtol=1e-4, atol=1e-5)
    one, other = (numbers(given([0, 1, 2], np.array(weights))) for weights in ([1, 1, 9], [9, 1, 1]))
    assert name in COARSE or not all(np.allclose(x, y, rtol=1e-3) for x, y in zip(one, other, strict=True))


OF_ROWS = [name for name in WEIGHTED if signature_of(name).weighs_rows]
SHARES = np.random.default_rng(0).uniform(0.1, 1, size=(3, 6))
SHARES[1, 2] = SHARES[0, 4] = SHARES[2, 4] = 0
DISCRETE = ("combine.vote", "scores.accuracy", "scores.mean_member_accuracy", "scores.top_k_accuracy")


@each(OF_ROWS)
def test_weights_of_each_row_are_as_for_that_row_alone(name, monkeypatch):
    own = arguments_of(name)
    arguments = own | {key: x for key, x in {"row_weights": None, "reduction": "none"}.items() if key in own}
    members = {key: x for key, x in own.items() if axis_of(name, key, "members") == 0 and key != "weights"}
    blank = lambda x: np.where((SHARES == 0).reshape(3, 6, *(1,) * (x.ndim - 2)), np.float32(np.nan), x)
    got = call(name, **arguments | along(name, "members", blank, members) | {"weights": SHARES})
    assert_close(call(name, **arguments | {"weights": SHARES * np.arange(1, 7)}), got)  # each row by its own sum
    if name.startswith("scores") and "reduction" not in arguments:  # scores of the mixture of all rows
        mixed = np.asarray(combine.mixture(arguments["logits"], weights=SHARES))[None]
        assert_close(got, call(name, **arguments | {"logits": mixed, "weights": None}))
        return
    alone = [call(name, **along(name, "rows", lambda x, i=i: x[i : i + 1], arguments | {"weights": None})
                  | {"weights": SHARES[:, i]}) for i in range(6)]  # fmt: skip
    assert_close(got, jax.tree.map(lambda *x: np.concatenate(x), *alone))
    if name in DISCRETE:
        return
    wrong = call(name, **arguments | {"weights": SHARES.mean(axis=1)})
    assert not all(map(np.allclose, numbers(got), numbers(wrong)))
    # In blocks of two rows.
    monkeypatch.setattr(_rows, "_BYTES", 100)
    given = lambda weights: call(name, **arguments | {"weights": weights})
    jax.clear_caches()
    assert_close(given(SHARES), got)
    jax.clear_caches()
    slope = jax.grad(lambda w: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(given(w))))(jnp.float32(SHARES))
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(np.sum(slope * SHARES, axis=0), 0, atol=1e-5)  # the scale of a row does not matter


# Rows, and members, that do not count.

CASES = [(name, "rows") for name in TAKING] + [(name, "members") for name in WEIGHTED]
KEEP = {"rows": {"row_weights": KEPT}, "members": {"weights": np.array([0.75, 0.0, 0.25])}}
PLACE = {"rows": 2, "members": 1}


@NOISE
@pytest.mark.parametrize("case", slow_but([case for case in CASES if case[0] in QUICK], CASES))
def test_what_does_not_count_may_hold_anything(case):
    name, kind = case
    assert_the_same(lambda value: numbers(call(name, **spoilt(name, kind, PLACE[kind], value) | KEEP[kind])))


# Functions of other rooms that take row weights or weights, whose annotations say less.
OTHERS = [(name, kind) for kind, option in KEEP.items() for name in NAMES if name not in ARRAYS
          and next(iter(option)) in arguments_of(name)
          and name not in ("tree.weighted_sum", "tree.weighted_mean")]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*best mean log score")
@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_what_does_not_count_may_hold_anything_in_other_rooms(name, kind):
    def given(value):
        def changed(x):
            """Floats along six rows, or three members."""
            axes = (
                [0] * (np.ndim(x) > 1 and len(x) == 3)
                if kind == "members"
                else np.flatnonzero([n == 6 for n in np.shape(x)[:2]])
            )
            if getattr(x, "dtype", None) != np.float32 or not len(axes):
                return x
            x = np.moveaxis(x.copy(), axes[0], 0)
            x[PLACE[kind]] = value
            return np.moveaxis(x, 0, axes[0])

        arguments = {key: x if key.endswith("weights") else changed(x) for key, x in arguments_of(name).items()}
        return numbers(call(name, **arguments | KEEP[kind]))

    assert_the_same(given)


@pytest.mark.filterwarnings("ignore:.*best mean log score")
@pytest.mark.parametrize("name", [name for name, kind in OTHERS if kind == "rows" and "density." not in name])
def test_row_weights_count_rows_in_other_rooms(name):
    repeat = lambda x: np.repeat(x, WHOLE, axis=np.shape(x).index(6)) if 6 in np.shape(x)[:2] else x
    options = arguments_of(name) | {"row_weights": None}
    options |= {"tolerance": 1e-6} if name.endswith("stacking") else {}
    want = call(name, **jax.tree.map(repeat, options))
    assert_close(call(name, **options | {"row_weights": WHOLE}), want, rtol=1e-4, atol=1e-6)


# Points of curves and draws are as many as rows; of candidates there are indices.
APART = RANDOM | {"scores.aurc", "scores.risk_coverage", "scores.roc_curve", "scores.precision_recall_curve"}
AS_ROWS = [name for name in TAKING if name not in APART and not name.startswith(("acquire", "conformal"))
           and not name.startswith("scores.pit")]  # fmt: skip
COUNTED = [name for name in TAKING if signature_of(name).only_counts]


@NOISE
@each(AS_ROWS)
def test_row_weights_count_rows(name):
    arguments = arguments_of(name) | ({"num_bins": 1} if name == "scores.ence" else {})
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if name.startswith("calibrate") else {"rtol": 1e-4, "atol": 1e-5}
    tolerance |= {"whole": False}  # counts are of rows, not of weights
    given = lambda changed, rows=None, **options: call(name, **arguments | changed | {"row_weights": rows} | options)
    broken = spoilt(name, "rows", 2, arguments=arguments)
    taken = along(name, "rows", lambda x: x[KEPT], arguments)
    masked = given(broken, KEPT)
    assert_close(masked, given(taken), **tolerance)
    if name in COUNTED:
        return
    smooths = name == "calibrate.platt"  # the targets, by the number of rows
    assert_close(given(broken, (1 if smooths else 0.3) * KEPT), masked, **tolerance)
    if name in ("scores.squared_calibration_error", "calibrate.vector"):  # less noise in more rows, or separable ones
        return
    got = given(broken, WHOLE * (1 if smooths else 1e-200))
    assert_close(got, given(along(name, "rows", lambda x: np.repeat(x, WHOLE, axis=0), arguments)), **tolerance)
    assert name in COARSE or not all(
        map(np.allclose, numbers(got), numbers(given(broken, np.array([3, 1, 0, 1, 1, 2]))))
    )
    if "reduction" in arguments:
        rows = np.asarray(given(broken, WHOLE, reduction="none"))
        np.testing.assert_array_equal(np.isnan(rows), ~KEPT)
        np.testing.assert_allclose(np.average(rows[KEPT], weights=WHOLE[KEPT]), got, rtol=1e-5)


@NOISE
@pytest.mark.usefixtures("unhooked")
@each([name for name in COUNTED if name not in RANDOM], QUICK)
def test_rows_that_are_counted(name):
    """By booleans, or numbers that are known to be zeros and ones."""
    assert_close(call(name, row_weights=1.0 * KEPT), call(name, row_weights=KEPT), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"`row_weights` of zeros and ones.\n  got 2 at index \(1,\)"):
        call(name, row_weights=WHOLE)
    with pytest.raises(TypeError, match="boolean `row_weights`.\n  got a traced array of dtype float32"):
        jax.jit(lambda row_weights: numbers(call(name, row_weights=row_weights)))(jnp.ones(6, jnp.float32))


MANY = 2**21


@each([name for name in AS_ROWS if name.startswith("scores") and name not in COUNTED],
      {"scores.auroc", "scores.by_group", "scores.mean_member_rmse"})  # fmt: skip
def test_many_rows_of_one_kind_are_one_row(name):
    """Sums over two million rows in float32: rounding has one sign, and differences of rates are not quite zero."""
    arguments = {key: x for key, x in arguments_of(name).items() if key != "row_weights"}
    arguments |= {"debiased": False} if "debiased" in arguments else {}
    index = [0, 1] if "positives" in arguments or name == "scores.r2" else [3]  # of both kinds, and not constant
    few = along(name, "rows", lambda x: x[index], arguments)
    many = along(name, "rows", lambda x: np.repeat(x, MANY // len(index), axis=0), few)
    got = call(name, **many | {"row_weights": np.full(MANY, 0.3)})
    assert_close(got, call(name, **few | {"row_weights": None}), rtol=2.5e-6, atol=1e-6, whole=False)


# Transformations, precisions and shapes.

FITS = {f"calibrate.{kind}" for kind in ("temperature", "vector", "matrix", "platt", "beta", "isotonic")}  # not traced
NO_GRADIENT = FITS | {"combine.stacking", "scores.energy_score", "scores.variogram_score"}


def floats_of(name, arguments):
    arrays = signature_of(name).arrays
    return {key: x for key, x in arguments.items()
            if key in arrays and arrays[key].is_number and getattr(x, "dtype", None) == np.float32}  # fmt: skip


@NOISE
@each([name for name in ARRAYS if name not in FITS and name != "conformal.aci"])
def test_jit_vmap_and_gradient(name):
    arguments = arguments_of(name)
    for kind, option in KEEP.items():
        if next(iter(option)) in arguments:
            arguments = spoilt(name, kind, PLACE[kind], arguments=arguments) | option
    given = floats_of(name, arguments)
    traced = given | {key: jnp.asarray(arguments[key]) for key in ("weights", "row_weights") if key in arguments}

    def total(floats, rest):
        leaves = [x for x in jax.tree.leaves(call(name, **arguments | rest | floats)) if hasattr(x, "dtype")]
        smooth = [jnp.where(jnp.isfinite(x), x, 0) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(map(jnp.sum, smooth), jnp.zeros(())), leaves

    rest = {key: x for key, x in traced.items() if key not in given}
    want = jax.tree.leaves(call(name, **arguments))
    run = (
        (lambda *x: (total(*x), None)) if name in NO_GRADIENT or not given else jax.value_and_grad(total, has_aux=True)
    )
    twice = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), (given, rest))
    (_, got), slope = jax.jit(jax.vmap(run))(*twice)
    assert_close([x[1] for x in got], want, rtol=1e-4, atol=1e-5)
    for argument, x in ({} if slope is None else slope).items():
        assert np.isfinite(x).all(), argument
        for kind, place in PLACE.items():
            if next(iter(KEEP[kind])) in arguments and (axis := axis_of(name, argument, kind)) is not None:
                assert not np.take(np.asarray(x)[0], place, axis=axis).any(), argument


@NOISE
@each([name for name in ARRAYS if name != "conformal.aci"])
def test_precisions(name):
    given, tolerance = floats_of(name, arguments_of(name)), {"rtol": 5e-3 if name in FITS else 2e-4, "atol": 1e-4}
    plain = numbers(call(name), whole=False)
    assert {x.dtype for x in plain} <= {np.dtype(np.float32)}
    for half in (jnp.bfloat16, np.float16):
        halved = {key: jnp.asarray(x, half) for key, x in given.items()}
        wide = {key: x.astype(np.float32) for key, x in halved.items()}
        assert_close(call(name, **halved), call(name, **wide), rtol=1e-6)
    with jax.enable_x64(True):
        found = numbers(call(name, **{key: x.astype(np.float64) for key, x in given.items()}), whole=False)
        assert {x.dtype for x in found} <= {np.dtype(np.float64)}
    if name not in RANDOM:
        assert_close(plain, found, **tolerance)


def located(name):
    """The arguments that lie on the axis of the targets."""
    arrays = signature_of(name).arrays
    mean = {"mean", "predictions", "errors"} | ({"values"} if name.startswith(("combine", "uncertainty")) else set())
    return [key for key in floats_of(name, arguments_of(name)) if arrays[key].values.place or key in mean]


@each([name for name in ARRAYS if name.startswith(("combine", "scores", "uncertainty")) and located(name)
       and name not in RANDOM], {"combine.moments", "scores.crps", "scores.r2", "uncertainty.quantile"})  # fmt: skip
def test_a_common_offset_costs_no_precision(name):
    """Of numbers near 1e4, which float32 holds to 1e-3."""
    far = {key: np.float32(1e4) + np.tile(arguments_of(name)[key], 1) for key in located(name)}
    options = {"lower": np.float32(1e4 - 1), "upper": np.float32(1e4 + 1)} if "threshold" in name else {}
    found = numbers(call(name, **far | options))
    with jax.enable_x64(True):
        arguments = {key: np.asarray(x, np.float64) for key, x in (floats_of(name, arguments_of(name)) | far).items()}
        exact = numbers(call(name, **arguments | options))
    for got, want in zip(found, exact, strict=True):
        allowed = np.where(np.abs(want) > 1e3, 1.2e-7, 2e-5) * np.abs(want) + 2e-6
        assert (np.abs(got - want) <= allowed)[np.isfinite(want)].all()


@NOISE
@each([name for name in ARRAYS if name not in RANDOM and "*batch" in signature_of(name).row_axes and name not in
       ("conformal.aci", "conformal.enbpi", "conformal.weighted_quantile")])  # fmt: skip
def test_rows_of_any_shape(name):
    folded = lambda x: x.reshape(*((2, 3) if len(x) == 6 else (1, len(x))), *x.shape[1:])
    shaped = dict(arguments_of(name))
    for argument, x in shaped.items():
        axis = axis_of(name, argument, "rows")
        if axis is not None and x is not None:
            moved = folded(np.moveaxis(np.asarray(x), axis, 0))
            shaped[argument] = np.moveaxis(moved, (0, 1), (axis, axis + 1))
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if name in FITS else {}
    for got, want in zip(numbers(call(name, **shaped)), numbers(call(name)), strict=True):
        assert_close(np.ravel(got), np.ravel(want), **tolerance)


@each([name for name in ARRAYS if name.startswith(("combine", "uncertainty")) and "targets" not in arguments_of(name)
       and name.rpartition(".")[2] not in ("decompose_nll", "error_correlation", "pairwise_disagreement", "q_statistic",
                                            "entropy", "stacking")])  # fmt: skip
def test_rows_of_any_number_are_one_program_of_export(name):
    (rows,) = export.symbolic_shape("rows")
    arguments, given = arguments_of(name), floats_of(name, arguments_of(name))
    axes = {key: axis_of(name, key, "rows") for key in given}
    shape = lambda key, x: tuple(rows if i == axes[key] else size for i, size in enumerate(x.shape))
    fn = lambda given: tuple(jax.tree.leaves(call(name, **arguments | given)))
    program = export.export(jax.jit(fn))(
        {key: jax.ShapeDtypeStruct(shape(key, x), x.dtype) for key, x in given.items()}
    )
    for count in (6, 1):
        some = {key: np.take(x, range(count), axis=axes[key]) for key, x in given.items()}
        if name not in RANDOM:
            assert_close(program.call(some), fn(some), rtol=1e-4, atol=1e-5)


@NOISE
@each([name for name in ARRAYS if "labels" in arguments_of(name) and name.startswith("scores") and "set" not in name
       and "coverage" not in name], {"scores.nll", "scores.ece", "scores.balanced_accuracy"})  # fmt: skip
def test_labels_out_of_range_are_not_taken_for_wrong(name):
    """While tracing they cannot be refused."""
    of_labels = jax.jit(lambda labels, kept: call(name, labels=labels, row_weights=kept))
    for label in (-1, 3):
        labels = jnp.asarray(arguments_of(name)["labels"]).at[2].set(label)
        assert all(np.isnan(x) for x in numbers(of_labels(labels, jnp.ones(6, bool))))
        assert all(np.isfinite(x) for x in numbers(of_labels(labels, jnp.asarray(KEPT))))


@NOISE
@each([name for name in ARRAYS if "logits" in arguments_of(name)])
def test_probabilities_are_told_from_logits(name):
    votes = signature_of(name).arrays["logits"].values.kind == "votes"
    p = np.float16(jax.nn.softmax(arguments_of(name)["logits"]))  # also in half precision
    told = pytest.warns(UserWarning, match="takes logits, but every row of these sums to 1")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if votes else "ignore")
        with told if not votes else warnings.catch_warnings():
            call(name, logits=p)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "takes logits")
        for quiet in (np.log(p), 0 * p, np.eye(3, dtype=np.float32)[np.zeros(p.shape[:-1], int)]):
            if name not in FITS:
                call(name, logits=quiet)


# Wrong arguments.


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 6, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 6)
SAMPLES, TARGETS = RNG.normal(size=(3, 6)).astype(np.float32), RNG.normal(size=6).astype(np.float32)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scores.crps(SAMPLES, TARGETS[:, None]), ValueError, "got (6, 1)\nA trailing axis"),
        (lambda: scores.crps(SAMPLES[..., None], TARGETS), ValueError, "pass `samples[..., 0]`"),
        (lambda: scores.crps(SAMPLES, np.tile(TARGETS, (3, 1))), ValueError, "Repeated for every member?"),
        (lambda: scores.nll(LOGITS, np.eye(4)[LABELS].astype(int)), ValueError, "One-hot labels?"),
        (lambda: scores.nll(LOGITS[0], LABELS), ValueError, "One model? Pass `logits[None]`"),
        (lambda: scores.nll(LOGITS, LABELS[:5]), ValueError, "the same rows in the same order"),
        (lambda: scores.nll(LOGITS, LABELS + 1), ValueError, "labels from 0 to 3, as there are 4 classes"),
        (lambda: scores.nll(LOGITS, LABELS * 1.0), TypeError, "integer `labels`"),
        (lambda: scores.nll(LOGITS[..., :1], LABELS), ValueError, "at least two classes"),
        (lambda: scores.crps(SAMPLES.astype(int), TARGETS), TypeError, "floating-point `samples`"),
        (lambda: scores.crps(SAMPLES[:0], TARGETS), ValueError, "at least one member"),
        (lambda: scores.nll_gaussian(SAMPLES, SAMPLES**2, TARGETS), ValueError, "takes no `members` axis"),
        (lambda: scores.width(TARGETS + 1, TARGETS), ValueError, "Swapped?"),
        (lambda: scores.set_size(LOGITS[0]), TypeError, "boolean `sets`"),
        (lambda: scores.pinball(TARGETS, TARGETS, level=90.0), ValueError, "a `level` between 0 and 1"),
        (lambda: scores.auroc(TARGETS, TARGETS < 99), ValueError, "positive and negative rows"),
        (lambda: scores.aurc(TARGETS[:0], TARGETS[:0]), ValueError, "at least one row"),
        (lambda: scores.by_group(TARGETS, LABELS, num_groups=2), ValueError, "`groups` from 0 to 1"),
        (lambda: scores.nll_gaussian(TARGETS, TARGETS * 0, TARGETS), ValueError, "A log-variance?"),
        (lambda: scores.nll_gaussian(TARGETS, 0 * TARGETS + 1e-40, TARGETS), ValueError, "variances above zero"),
        (lambda: scores.rank_histogram(SAMPLES, TARGETS, key=0), TypeError, "needs one key"),
        (lambda: scores.top_k_accuracy(LOGITS, LABELS, k=5), ValueError, "`k` of at most 4"),
        (lambda: scores.energy_score(SAMPLES[:, 0], TARGETS[0]), ValueError, "of shape (members, *batch, out)"),
        (lambda: scores.variogram_score(LOGITS, LOGITS[0], order=0.0), ValueError, "`order` above zero"),
        (lambda: scores.crps(SAMPLES[:1], TARGETS, estimator="fair"), ValueError, "at least two members"),
        (lambda: scores.crps(SAMPLES, TARGETS, row_weights=np.ones(5)), ValueError, "one of `row_weights` per row"),
    ],
)
def test_an_error_says_what_to_write(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
    assert str(caught.value).startswith(("`scores.", "`combine."))


def test_float64_keeps_a_common_offset():
    """Of 1e9, of which float32 would keep 64."""
    samples, targets = SAMPLES.astype(np.float64), TARGETS.astype(np.float64)
    for score in (scores.crps, scores.rmse, scores.mae, scores.pit):
        np.testing.assert_allclose(score(samples + 1e9, targets + 1e9), score(samples, targets), rtol=1e-5, atol=1e-6)
    far, near = (scores.nll_gaussian(samples[0] + x, np.exp(samples[0]), targets + x) for x in (1e9, 0))
    np.testing.assert_allclose(far, near, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-9, 1e-55])
def test_float64_keeps_the_order(scale):
    inside = np.arange(40) % 2 == 1
    gaps = scale * (RNG.uniform(size=40) + inside)
    values = 1 - gaps if scale > 1e-16 else -gaps
    assert scores.auroc(values, inside) == 0


def test_python_numbers_take_the_dtype_of_arrays():
    with jax.enable_x64(True):
        assert combine.product_gaussian(SAMPLES, SAMPLES**2, power=2.0).mean.dtype == jnp.float32
        assert combine.product_gaussian(SAMPLES, SAMPLES**2, power=np.float64(2)).mean.dtype == jnp.float64
        assert scores.nll_gaussian(0.0, 1.0, 1.0).dtype == jnp.float64


COUNTS = "max_outcomes num_anchors num_axes num_bins num_classes num_draws num_folds num_groups num_members"
COUNTS += " num_picks num_rows num_sets k num_levels num_samples num_free size window"

# What gives a result, by argument and value, and why that is right.
MEANT = {
    **{(name, "int64"): "NumPy's integers are counts" for name in COUNTS.split()},
    ("size", "float32"): "half of the rows",
    **{("rate", kind): "a number above zero" for kind in ("int64", "float32")},
    ("risk", "float32"): "half of the largest loss",
    ("bound", "int64"): "NumPy's integers are losses",
    ("level", "float32"): "NumPy's floats are levels",
    ("levels", "float32"): "one level",
    ("levels", "0"): "the lowest value",
    **{(name, kind): "a value" for name in ("best", "optimum") for kind in ("-1", "0", "int64", "float32")},
    ("power", "0"): "a uniform draw",
    ("cut", "0"): "the mean",
    **{("lower", kind): "a threshold" for kind in ("-1", "0", "int64", "float32")},
    **{("upper", kind): "a threshold" for kind in ("inf", "-1", "0", "int64", "float32")},
    **{("order", kind): "a power above zero" for kind in ("int64", "float32")},
    **{(name, kind): "a number of zero or more"
       for name in ("beta", "bias_penalty", "coefficient", "floor", "kl_weight", "off_diagonal_penalty", "penalty",
                    "ridge", "smoothing", "step")
       for kind in ("0", "int64", "float32")},
    **{("tolerance", kind): "a number; it warns if it is missed" for kind in ("-1", "0", "int64", "float32")},
    **{(name, kind): "a number above zero" for name in ("power", "temperature")
       for kind in ("int64", "float32")},
    **{("index", kind): "indices count from either end" for kind in ("-1", "0", "int64")},
    **{("new_ratios", kind): "weights of any number of new rows"
       for kind in ("0", "int64", "float32", "array", "3d")},
    **{("logits", kind): "log-probabilities of one model have any number of axes of rows" for kind in ("array", "3d")},
    **{(name, kind): "parameters of one model have any number of axes of rows"
       for name in ("concentration", "quantiles", "step") for kind in ("array", "3d")},
    **{("tree", kind): "an array is a tree of one leaf" for kind in ("array", "3d")},
    **{("values", kind): "a choice of arrays" for kind in ("array", "3d")},
}  # fmt: skip


@pytest.mark.usefixtures("unhooked")
@each(NAMES)
def test_wrong_arguments_give_our_errors_and_odd_ones_what_is_meant(name):
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for argument, (kind, value) in itertools.product(arguments_of(name), BAD_OF_ARRAYS.items()):
            if fault := _fault(name, argument, kind, value):
                faults.append(f"`{argument}` given {kind}: {fault}")
    assert not faults, "\n".join(faults)


def _fault(name, argument, kind, value):
    try:
        result = call(name, **{argument: value})
    except (TypeError, ValueError, IndexError) as error:  # IndexError for rows that are not there
        last, own = traceback.extract_tb(error.__traceback__)[-1].filename, name.rpartition(".")[2]
        named = any(
            f"`{prefix}{own}" in str(error)
            for prefix in ("", f"{name.removesuffix(own)}", f"eqx_ensemble.{name.removesuffix(own)}")
        )
        return None if "eqx_ensemble" in last and named else f"{type(error).__name__} at {last}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if value is None:
        return None if signature_of(name).signature.parameters[argument].default is None else "None was taken"
    if (argument, kind) not in MEANT:
        return "was taken"
    return "the result is NaN" if any(np.isnan(x).any() for x in numbers(result, whole=False)) else None
