"""Random arguments of array functions, and float64 copies of what they mean."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

FLOATS = (np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


@dataclasses.dataclass
class Case:
    """A function, its arguments, and what it must return."""

    function: Callable
    arrays: dict[str, Any]
    options: dict[str, Any]
    want: Any
    rtol: float = 1e-4
    atol: float = 1e-5
    holds: Callable = lambda got: True  # what else is true of the result


class Draw:
    """Draws arguments; `said` lists every choice, for the message of a failure."""

    def __init__(self, seed, *, x64):
        self.rng, self.said, self.x64 = np.random.default_rng(seed), {}, x64
        self.rows, self.members, self.classes = (
            self.pick("rows", 1, 2, 7, 64),
            self.pick("members", 1, 2, 5),
            self.pick("classes", 2, 4),
        )
        self.own = np.ones(self.rows)  # the weight of each row
        self.share = np.full((self.members, 1), 1 / self.members)  # of each member, `(members, rows or 1)`

    def pick(self, label, *choices):
        self.said[label] = choices[self.rng.integers(len(choices))]
        return self.said[label]

    def level(self):
        return self.pick("level", 0.5, 0.6, 0.8, 0.9)

    def numbers(self, label, *shape, kinds=("normal", "ties", "far"), dtypes=FLOATS):
        """Numbers of a random dtype, as the library gets them."""
        kind, dtype = self.pick(f"{label}.kind", *kinds), self.pick(f"{label}.dtype", *dtypes)
        found = self.rng.normal(size=shape)
        if kind == "ties":
            found = np.round(found)
        if kind == "far":
            found += 100
        if kind == "infinite":
            found = np.where(self.rng.random(shape) < 0.2, self.rng.choice([-np.inf, np.inf], shape), found)
        if kind == "steep":
            found *= 100
        if kind == "impossible":  # log-probabilities, of which some are of zero
            found[..., 1:] = np.where(self.rng.random(found[..., 1:].shape) < 0.3, -np.inf, found[..., 1:])
        return found.astype(dtype)

    def logits(self, kinds=("normal", "steep", "impossible"), *, members=True):
        shape = (self.members,) if members else ()
        return self.numbers("logits", *shape, self.rows, self.classes, kinds=kinds)

    def labels(self):
        return self.rng.integers(0, self.classes, self.rows).astype(self.pick("labels", np.int32, np.int64, np.uint8))

    def positives(self):
        """Positive rows of both kinds among the first two."""
        return self.rng.permutation(np.arange(self.rows) % 2 == 0) if self.rows == 2 else self._mixed()

    def _mixed(self):
        found = self.rng.random(self.rows) < 0.4
        found[:2] = [True, False][: self.rows]
        return found

    def wide(self, values):
        """The values as float64 after the library's own rounding: those of NumPy are float32 unless `x64`."""
        values = np.asarray(values)
        return (values if self.x64 else values.astype(np.float32)).astype(np.float64)

    def exact(self, values):
        """The values as float64, as the function gets them: `jax.jit` rounds its arguments."""
        return self.wide(values) if self.said.get("jit") else np.asarray(values).astype(np.float64)

    def weighted_members(self, *, per_row=False):
        """The argument `weights`; sets `share`."""
        kind = self.pick("weights", None, "random", "zeros", "one", "tiny", "integer", *(["per row"] * per_row))
        if kind is None:
            return {}
        shape = (self.members, self.rows) if kind == "per row" else (self.members, 1)
        found = self.rng.exponential(size=shape)
        if kind == "integer":
            found = self.rng.integers(1, 4, shape)
        if kind in ("zeros", "one", "per row"):
            found *= self.rng.random(shape) < (0 if kind == "one" else 0.6)
            found[self.rng.integers(self.members)] = 1.0
        if kind == "tiny":
            found = found * 1e-60
        self.share = found / found.sum(0)
        return {"weights": found if kind == "per row" else found[:, 0]}

    def counted_rows(self, *, weights=True, keep=0):
        """The argument `row_weights`, of which the first `keep` rows are kept; sets `own`."""
        kind = self.pick("row_weights", None, "booleans", *(["random", "integer", "tiny"] if weights else []))
        kept = self.rng.random(self.rows) < 0.6
        kept[:keep] = True
        kept[self.rng.integers(self.rows)] = True
        if kind is None:
            return {}
        found = self.rng.exponential(size=self.rows) * (1e-60 if kind == "tiny" else 1)
        if kind == "integer":
            found = self.rng.integers(1, 4, self.rows)
        found = kept if kind == "booleans" else found * kept
        self.own = self.own * (found / found.max())
        return {"row_weights": found}

    def spoil(self, values, *, members, fill=np.nan):
        """The values with `fill` for ignored members and in ignored rows."""
        values = values.copy()
        values[(slice(None),) * members + (self.own == 0,)] = fill
        if members:
            values[np.broadcast_to(self.share == 0, values.shape[:2])] = fill
        return values

    def mean(self, rows):
        """The weighted mean over rows that count."""
        counted = self.own > 0
        return np.average(rows[counted], weights=self.own[counted])

    def reduced(self, rows):
        """The option `reduction`, and the result of the rows for it."""
        if self.pick("reduction", "mean", "none") == "none":
            return {"reduction": "none"}, np.where(self.own > 0, rows, np.nan)
        return {}, self.mean(rows)


def check(case, draw):
    """Calls the function, compiled or not, and compares."""
    call = lambda arrays: case.function(**arrays, **case.options)
    traced = "tiny" not in (draw.said.get("weights"), draw.said.get("row_weights"))  # float32 does not hold them
    got = (jax.jit(call) if traced and draw.pick("jit", False, False, True) else call)(case.arrays)
    assert case.holds(got)
    got, want = jax.tree.leaves(got), jax.tree.leaves(case.want)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=case.rtol, atol=case.atol)
