"""Static values as a checkpoint describes them: equal for equal values, different for others."""

import collections
import dataclasses
import datetime
import enum
import fractions
import functools as ft
import itertools
import pathlib
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble.checkpoint._structure import static_text

KEY = jax.random.key(0)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    name: str = "a"
    cache: object = dataclasses.field(default=None, compare=False)


Pair = collections.namedtuple("Pair", ["a", "b"])


def values():
    """Values that differ from each other, created at each call."""
    return {
        "nothing": None,
        "true": True,
        "one": 1,
        "one and a half": 1.5,
        "complex": 1.5j,
        "a string": "1",
        "bytes": b"1",
        "an enumeration": Colour.RED,
        "another one of it": Colour.BLUE,
        "flags": Flags.A | Flags.B,
        "a flag": Flags.A,
        "a dataclass": Config(3),
        "another dataclass": Config(4),
        "another text in it": Config(3, "b"),
        "a dataclass in another": Config(Config(3)),
        "a dataclass in another, different": Config(Config(4)),
        "a named tuple": Pair(1, 2),
        "another named tuple": Pair(1, 3),
        "a tuple": (1, 2),
        "a list": [1, 2],
        "a long tuple": tuple(range(1000)),
        "a long tuple that ends otherwise": (*range(999), -1),
        "a long string": "x" * 1000,
        "a longer string": "x" * 1001,
        "a dict": {"a": 1, "b": 2},
        "another dict": {"a": 1, "b": 3},
        "a proxy of a dict": types.MappingProxyType({"a": 1, "b": 4}),
        "a set": {1, 2},
        "a frozen set": frozenset(["a", "b", "c"]),
        "a slice": slice(1, 2),
        "a range": range(3),
        "a fraction": fractions.Fraction(1, 3),
        "a path": pathlib.PurePosixPath("a"),
        "a date": datetime.date(2020, 1, 1),
        "a dtype": np.dtype("float32"),
        "a class": Config,
        "a function": jax.nn.relu,
        "another function": jax.nn.gelu,
        "a partial function": ft.partial(jax.nn.leaky_relu, negative_slope=0.1),
        "with another number": ft.partial(jax.nn.leaky_relu, negative_slope=0.2),
        "of another function": ft.partial(jax.nn.elu, 0.1),
        "a partial function in another": ft.partial(ft.partial(jax.nn.elu, 0.1), 0.2),
        "an array": np.arange(3.0),
        "another array": np.arange(1.0, 4.0),
        "an array of strings": np.array(["a"]),
        "a jax array": jnp.arange(3),
        "a key": jax.random.key(3),
        "a Module": eqx.nn.Dropout(0.1),
        "another Module": eqx.nn.Dropout(0.2),
    }


def test_different_values_differ_and_equal_ones_do_not():
    first, again = ({name: static_text(value) for name, value in values().items()} for _ in range(2))
    assert first == again
    assert max(map(len, first.values())) < 250
    for a, b in itertools.combinations(first, 2):
        assert first[a] != first[b], (a, b)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(Colour),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.builds(Config, inner, st.text()),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(TREES, TREES)
def test_one_text_for_one_value(a, b):
    """`repr` distinguishes 0.0 from -0.0 and 1 from True, as the texts do; `Config` has one of its own."""
    assert (static_text(a) == static_text(b)) == (repr(a) == repr(b) or (a == b and _alike(a, b)))


def _alike(a, b):
    """Equal dicts whose items have another order."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, Config):
        return isinstance(b, Config) and a.name == b.name and _alike(a.width, b.width)
    return repr(a) == repr(b)


def test_what_cannot_be_distinguished():
    """As documented for `load`."""
    assert static_text(lambda x: x + 1) == static_text(lambda x: x + 2)
    assert static_text(object()) == static_text(object())


def test_of_what_is_no_part_of_a_value():
    assert static_text(Config(3, cache=1)) == static_text(Config(3, cache=2))
    assert static_text(7) == static_text(np.int64(7))


def test_what_holds_itself_has_a_text():
    itself = []
    itself.append(itself)
    assert static_text(itself).count("[") > 1


class Model(eqx.Module):
    linear: eqx.nn.Linear
    config: object = eqx.field(static=True)

    def __init__(self, config, key):
        self.linear = eqx.nn.Linear(2, 1, key=key)
        self.config = config


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (Config(3), Config(4), "saved Config(width=3, name='a'), expected Config(width=4, name='a')"),
        (Colour.RED, Colour.BLUE, "saved Colour.RED, expected Colour.BLUE"),
        (ft.partial(max, 1), ft.partial(max, 2), "saved partial(max, 1), expected partial(max, 2)"),
        (tuple(range(99)), (*range(98), 0), "sha256"),
    ],
)
def test_loading_notices(tmp_path, saved, now, said):
    ee.save(tmp_path / "a", Model(saved, KEY))
    ee.load(tmp_path / "a", Model(saved, KEY))
    with pytest.raises(ee.MemberMismatchError, match="parts that are not arrays differ") as caught:
        ee.load(tmp_path / "a", Model(now, KEY))
    assert said in str(caught.value)
