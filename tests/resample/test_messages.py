"""Messages for wrong inputs, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import resample

KEY = jax.random.key(0)
X = np.zeros((10, 3))
LABELS = np.array(["a"] * 7 + ["b"] * 3)
FOLDS = resample.folds(10, 3)
PREDICTIONS = np.zeros((3, 10))
TRAIN, TEST = np.arange(5), np.arange(5, 10)


def bootstrap(num_rows=10, num_members=3, key=KEY, **options):
    return resample.bootstrap(num_rows, num_members, key=key, **options)


def subsets(size=5, **options):
    return resample.subsets(10, 3, size=size, key=KEY, **options)


BAD = {
    "data for their length": (
        lambda: bootstrap(X),
        "TypeError: `resample.bootstrap` needs the number of rows as `num_rows`.\n"
        "  got an array of shape (10, 3)\n"
        "Pass `len(x)`.",
    ),
    "no rows": (
        lambda: bootstrap(0),
        "ValueError: `resample.bootstrap` needs `num_rows` of at least 1, got 0.",
    ),
    "rows that int32 cannot count": (
        lambda: bootstrap(2**31),
        "ValueError: `resample.bootstrap` needs `num_rows` below 2**31, as rows are int32.\n"
        "  got 2147483648\n"
        "Resample the data in parts.",
    ),
    "no members": (
        lambda: resample.poisson_weights(10, 0, key=KEY),
        "ValueError: `resample.poisson_weights` needs `num_members` of at least 1, got 0.",
    ),
    "half a member": (
        lambda: resample.bayesian_weights(10, 0.5, key=KEY),  # pyright: ignore
        "TypeError: `resample.bayesian_weights` needs an integer `num_members`, got 0.5.",
    ),
    "no key": (
        lambda: bootstrap(key=None),
        "TypeError: `resample.bootstrap` needs one key: for example `key=jax.random.key(0)`.",
    ),
    "another generator": (
        lambda: bootstrap(key=jax.random.key(0, impl="rbg")),
        "TypeError: `resample.bootstrap` needs a threefry key, got one of 'rbg': other generators draw "
        "differently under `jax.vmap`, so a member would depend on its neighbours.\n"
        "Use `jax.random.key(seed, impl='threefry2x32')`.",
    ),
    "an integer for a key": (
        lambda: resample.folds(10, 3, key=1),
        "TypeError: `resample.folds` needs one key, got the integer 1.\nMake a key of it: `jax.random.key(1)`.",
    ),
    "a traced key": (
        lambda: jax.jit(lambda key: bootstrap(key=key))(KEY),
        "TypeError: `resample.bootstrap` needs a concrete key, because rows are drawn on the host.\n"
        "  got a traced key\n"
        "Draw outside `jax.jit` and pass the result in: rows and weights are ordinary arrays.",
    ),
    "a fraction above one": (
        lambda: bootstrap(size=1.5),
        "ValueError: `resample.bootstrap` needs a fraction `size` above 0 and at most 1.\n"
        "  got 1.5\n"
        "A count is passed as an integer: `size=100`.",
    ),
    "a fraction of less than a row": (
        lambda: subsets(0.01),
        "ValueError: `resample.subsets` needs a `size` of at least one row.\n"
        "  got 0.01 of 10 rows\n"
        "Pass a larger fraction, or a count.",
    ),
    "a size of zero": (
        lambda: bootstrap(size=0),
        "ValueError: `resample.bootstrap` needs `size` of at least 1, got 0.",
    ),
    "a subset larger than the data": (
        lambda: subsets(11),
        "ValueError: `resample.subsets` needs `size` of at most the number of rows.\n"
        "  got 11 of 10 rows\n"
        "Drawing with replacement is `bootstrap`, which has no such limit.",
    ),
    "labels of the wrong length": (
        lambda: bootstrap(stratify=LABELS[:9]),
        "ValueError: `resample.bootstrap` needs one label per row in `stratify`.\n"
        "  expected shape (10,), got (9,)\n"
        "Labels are in the order of the rows.",
    ),
    "labels in a column": (
        lambda: bootstrap(stratify=LABELS[:, None]),
        "ValueError: `resample.bootstrap` needs one label per row in `stratify`.\n"
        "  expected shape (10,), got (10, 1)\n"
        "Pass `stratify[:, 0]`.",
    ),
    "one-hot labels": (
        lambda: bootstrap(stratify=np.eye(10)),
        "ValueError: `resample.bootstrap` needs one label per row in `stratify`.\n"
        "  expected shape (10,), got (10, 10)\n"
        "One-hot labels? Pass `stratify.argmax(axis=1)`.",
    ),
    "real-valued labels": (
        lambda: subsets(stratify=np.linspace(0, 1, 10)),
        "TypeError: `resample.subsets` needs discrete labels in `stratify`.\n"
        "  got dtype float64\n"
        "Real-valued targets are binned first: `np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))`.",
    ),
    "labels that are missing": (
        lambda: subsets(stratify=np.array(["a", None] * 5, dtype=object)),
        "TypeError: `resample.subsets` needs labels of one kind in `stratify`.\n"
        "  got objects that cannot be sorted: '<' not supported between instances of 'NoneType' and 'str'\n"
        "Missing labels? Replace them by a label for missing values.",
    ),
    "traced labels": (
        lambda: jax.jit(lambda labels: subsets(stratify=labels))(jnp.arange(10) % 2),
        "TypeError: `resample.subsets` needs a concrete `stratify`.\n  got a traced array\nResample before `jax.jit`.",
    ),
    "a class that is left out": (
        lambda: subsets(1, stratify=LABELS),
        "ValueError: `resample.subsets` needs a `size` that leaves rows of every class.\n"
        "  got 1 of 10 rows, none of the 3 of class 'b'\n"
        "Pass a larger `size`, or no `stratify`.",
    ),
    "one fold": (
        lambda: resample.folds(10, 1),
        "ValueError: `resample.folds` needs `num_folds` from 2 to the number of rows.\n"
        "  got 1 folds of 10 rows\n"
        "Each fold has at least one row, and there are at least two folds.",
    ),
    "more folds than rows": (
        lambda: resample.folds(10, 11),
        "ValueError: `resample.folds` needs `num_folds` from 2 to the number of rows.\n"
        "  got 11 folds of 10 rows\n"
        "Each fold has at least one row, and there are at least two folds.",
    ),
    "more folds than rows of a class": (
        lambda: resample.folds(10, 4, stratify=LABELS),
        "ValueError: `resample.folds` needs as many rows of every class as folds.\n"
        "  got 4 folds and 3 rows of class 'b'\n"
        "Pass fewer folds, or merge rare classes.",
    ),
    "more folds than groups": (
        lambda: resample.folds(10, 3, groups=LABELS),
        "ValueError: `resample.folds` needs as many groups as folds.\n"
        "  got 3 folds and 2 groups\n"
        "Pass fewer folds; `groups` are rows that belong together, `stratify` are classes.",
    ),
    "groups of many sizes": (
        lambda: resample.folds(10, 2, groups=LABELS),
        "ValueError: `resample.folds` needs training sets whose lengths differ by at most one row.\n"
        "  got 3 to 7 rows\n"
        '`uneven="trim"` drops rows of the longer ones, `uneven="repeat"` repeats rows of the shorter ones; with '
        "either, weights `in_train` train on exactly the rows of each split.",
    ),
    "another word": (
        lambda: resample.folds(10, 3, uneven="pad"),  # pyright: ignore
        "ValueError: `resample.folds` needs `uneven` to be one of 'trim', 'repeat', None, got 'pad'.",
    ),
    "a splitter": (
        lambda: resample.from_splits(object(), 10),  # pyright: ignore
        "TypeError: `resample.from_splits` needs an iterable of `(train, test)` row indices.\n"
        "  got an object\n"
        "Pass the result of a splitter: `splitter.split(x, y)`.",
    ),
    "no splits": (
        lambda: resample.from_splits([], 10),
        "ValueError: `resample.from_splits` needs at least one split.\n"
        "  got none\n"
        "An exhausted generator? Call `splitter.split(x, y)` again.",
    ),
    "one split alone": (
        lambda: resample.from_splits((TRAIN, TEST), 10),  # pyright: ignore
        "TypeError: `resample.from_splits` needs pairs `(train, test)` of row indices.\n"
        "  got a ndarray as split 0\n"
        "Put one split in a list: `[(train, test)]`.",
    ),
    "masks": (
        lambda: resample.from_splits([(LABELS == "a", LABELS == "b")], 10),
        "TypeError: `resample.from_splits` needs integer row indices.\n"
        "  got booleans as the train rows of split 0\n"
        "Pass `np.flatnonzero(mask)`.",
    ),
    "names of rows": (
        lambda: resample.from_splits([(TRAIN, LABELS)], 10),
        "TypeError: `resample.from_splits` needs integer row indices.\n"
        "  got dtype <U1 as the test rows of split 0\n"
        "Pass the rows' positions, not their labels.",
    ),
    "an empty test part": (
        lambda: resample.from_splits([(TRAIN, TEST), (TRAIN, [])], 10),
        "ValueError: `resample.from_splits` needs row indices `(n,)`, at least one.\n"
        "  got shape (0,) as the test rows of split 1\n"
        "Each split needs training rows and test rows.",
    ),
    "a row outside the data": (
        lambda: resample.from_splits([(TRAIN, TEST)], 9),
        "IndexError: `resample.from_splits` needs rows from 0 to 8.\n"
        "  got 9 at index (4,), the first of 1 such of the test rows of split 0\n"
        "Rows count from 0; `num_rows` is the length of the data that they index.",
    ),
    "a leak": (
        lambda: resample.from_splits([(TRAIN, TEST - 2)], 10),
        "ValueError: `resample.from_splits` needs no row in both the train and the test part of a split.\n"
        "  got 2 of them in split 0, the first is row 3\n"
        "The test rows would not be held out.",
    ),
    "a row tested twice": (
        lambda: resample.from_splits([(TRAIN, [5, 6, 6])], 10),
        "ValueError: `resample.from_splits` needs test rows that differ.\n"
        "  got row 6 2 times in the test rows of split 0\n"
        "Only training rows may repeat.",
    ),
    "counts of weights": (
        lambda: resample.counts(np.ones((3, 10), np.float32), 10),
        "TypeError: `resample.counts` needs integer rows (members, n).\n"
        "  got float32 of shape (3, 10)\n"
        "Pass row indices; weights do not need `counts`.",
    ),
    "rows of one member": (
        lambda: resample.counts(np.arange(3), 10),
        "ValueError: `resample.counts` needs rows of shape (members, n), at least one.\n"
        "  got shape (3,)\n"
        "One member? Add a leading axis: `rows[None]`.",
    ),
    "negative rows": (
        lambda: resample.counts(np.array([[0, -1]]), 10),
        "IndexError: `resample.counts` needs rows from 0 to 9.\n"
        "  got -1 at index (0, 1), the first of 1 such\n"
        "Rows count from 0; `num_rows` is the length of the data that they index.",
    ),
    "weights of other data": (
        lambda: resample.out_of_bag(np.ones((3, 9), np.float32), 10),
        "ValueError: `resample.out_of_bag` needs weights of shape (members, 10).\n"
        "  got float32 of shape (3, 9)\n"
        "Integers are row indices `(members, n)`, other numbers are weights `(members, rows)`.",
    ),
    "negative weights": (
        lambda: resample.out_of_bag(np.array([[1.0, -0.5]]), 2),
        "ValueError: `resample.out_of_bag` needs finite `drawn` of zero or more.\n"
        "  got -0.5 at index (0, 1), the first of 1 such\n"
        "A row of weight zero is out of bag.",
    ),
    "rows of other members": (
        lambda: resample.out_of_bag_mean(PREDICTIONS, bootstrap(10, 4)),
        "ValueError: `resample.out_of_bag_mean` needs rows or weights of the members that predict.\n"
        "  expected 3 members as in `predictions`, got shape (4, 10)\n"
        "Members have the same order in both.",
    ),
    "predictions of one member": (
        lambda: resample.out_of_bag_mean(PREDICTIONS[0], bootstrap()),
        "ValueError: `resample.out_of_bag_mean` needs `predictions` of shape (members, rows, ...).\n"
        "  got shape (10,)\n"
        "One member? Add a leading axis: `predictions[None]`.",
    ),
    "predicted classes": (
        lambda: resample.out_of_fold(PREDICTIONS.astype(np.int32), FOLDS),
        "TypeError: `resample.out_of_fold` needs floating-point `predictions`.\n"
        "  got dtype int32, shape (3, 10)\n"
        "Predictions come first, targets last; whole-numbered predictions need `.astype(float)`.",
    ),
    "rows for folds": (
        lambda: resample.out_of_fold(PREDICTIONS, FOLDS.test),  # pyright: ignore
        "TypeError: `resample.out_of_fold` needs `folds` to be a `Folds`.\n"
        "  got an ArrayImpl\n"
        "For other splits use `from_splits(splits, num_rows)`.",
    ),
    "predictions of test rows": (
        lambda: resample.out_of_fold(PREDICTIONS[:, :4], FOLDS),
        "ValueError: `resample.out_of_fold` needs `predictions` (members, rows, ...) of the members and "
        "rows of the folds.\n"
        "  expected (3, 10, ...), got (3, 4)\n"
        'Predictions of all rows are `rows="all"`, of `folds.test` alone `rows="test"`.',
    ),
    "predictions of all rows": (
        lambda: resample.out_of_fold(PREDICTIONS, FOLDS, rows="test"),
        "ValueError: `resample.out_of_fold` needs `predictions` (members, test, ...) of the members and "
        "rows of the folds.\n"
        "  expected (3, 4, ...), got (3, 10)\n"
        'Predictions of all rows are `rows="all"`, of `folds.test` alone `rows="test"`.',
    ),
    "other rows": (
        lambda: resample.out_of_fold(PREDICTIONS, FOLDS, rows="train"),  # pyright: ignore
        "ValueError: `resample.out_of_fold` needs `rows` to be one of 'all', 'test', got 'train'.",
    ),
    "weights of two members": (
        lambda: resample.out_of_fold(PREDICTIONS, FOLDS, weights=np.ones(2)),
        "ValueError: `resample.out_of_fold` needs one weight per member.\n"
        "  expected shape (3,), got (2,)\n"
        "Weights are in the order of the members.",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("unhooked")
def test_message(name):
    call, expected = BAD[name]
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    # JAX adds a note on its own frames to what is raised while tracing.
    message = str(caught.value).split("\n--------------------\n")[0]
    assert f"{caught.type.__name__}: {message}" == expected
