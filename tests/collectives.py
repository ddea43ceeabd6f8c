"""What devices send each other in a compiled program, by its text."""

import math
import re

import equinox as eqx

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def text_of(fn, *args):
    """The optimised program of `fn(*args)` for one device."""
    return eqx.filter_jit(fn).lower(*args).compile().compiled.as_text()


def collectives(text):
    """The kind of each collective, and the bytes of its result on one device; one in a loop counts once."""
    return [(kind, _bytes(shape)) for shape, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text)]


def _bytes(shapes):
    arrays = re.findall(r"\b(pred|[a-z]+([0-9]+)[a-z0-9]*)\[([0-9,]*)\]", shapes)
    sizes = lambda dims: math.prod(int(size) for size in dims.split(",") if size)
    return sum(sizes(dims) * (int(bits) if bits else 8) // 8 for _, bits, dims in arrays)
