from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from ..._check import check_positive_int
from ._check import check_entries, check_heads

Entry = Callable[[Any], Any] | tuple[Callable[[Any], Any], int]
"""A function that selects a layer of a model; or a function that selects an array, and one of its axes."""


class Units(eqx.Module):
    """Hidden units that may be permuted: the layers that output them, and the layers that take them as input.

    Channels of a convolution, and the entries of a residual stream, are units too. A layer is selected as in
    `equinox.tree_at`. Its axes are known for `equinox.nn.Linear`, `Conv`, `ConvTranspose`, `Embedding`, `LayerNorm`,
    `RMSNorm`, `GroupNorm`, `BatchNorm` (with its running statistics), `PReLU`, `MLP` and `MultiheadAttention`. For
    other layers select arrays, each with its axis: `(lambda model: model.scale, 0)`.

    A layer with several inputs per unit, such as the first one after flattened channels, must have them ordered by
    unit, as after `jnp.ravel` of an array `(channels, height, width)`.

    **Arguments:**

    - `outputs`: all layers that output these units or have one value per unit: the preceding layer, norms, depthwise
        convolutions; for a residual stream, every layer that adds to it.
    - `inputs`: all layers that take these units as input.
    - `size`: the number of units; by default that of the first entry of `outputs`. A smaller number permutes blocks of
        equal size.

    **Raises:** `TypeError` for entries that are neither functions nor pairs `(function, axis)`; `ValueError` for empty
    `outputs` and a `size` below 1.

    ```python
    units = ee.methods.alignment.Units(
        outputs=[lambda model: model.conv, lambda model: model.norm],
        inputs=[lambda model: model.linear],
    )
    ```
    """

    outputs: tuple[Entry, ...]
    inputs: tuple[Entry, ...]
    size: int | None = eqx.field(static=True)

    def __init__(self, outputs: Sequence[Entry], inputs: Sequence[Entry] = (), *, size: int | None = None) -> None:
        name = "methods.alignment.Units"
        self.outputs = check_entries(outputs, "outputs", name=name)
        self.inputs = check_entries(inputs, "inputs", name=name)
        self.size = None if size is None else check_positive_int(size, "size", name=name)


class Heads(eqx.Module):
    """Attention heads that may be permuted, and the units inside each head.

    Heads are permuted as a whole; inside a head, queries and keys share one order, and values have another. Axes must
    be ordered by head. [`eqx_ensemble.methods.alignment.find_units`][] finds `equinox.nn.MultiheadAttention`. With
    rotary position embeddings, units inside a head cannot be permuted: use `Units(..., size=num_heads)`.

    **Arguments:**

    - `num_heads`: the number of heads.
    - `qk`: the [`eqx_ensemble.methods.alignment.Units`][] of queries and keys, for example with their two layers as
        `outputs`.
    - `vo`: the units of the values, which are inputs of the layer after the heads.

    **Raises:** `TypeError` for parts that are not `Units`; `ValueError` for `num_heads` below 1.

    ```python
    alignment = ee.methods.alignment
    heads = alignment.Heads(
        4,
        qk=alignment.Units([lambda m: m.query, lambda m: m.key]),
        vo=alignment.Units([lambda m: m.value], inputs=[lambda m: m.output]),
    )
    ```
    """

    num_heads: int = eqx.field(static=True)
    qk: Units
    vo: Units

    def __init__(self, num_heads: int, *, qk: Units, vo: Units) -> None:
        self.num_heads = check_positive_int(num_heads, "num_heads", name="methods.alignment.Heads")
        check_heads(qk, vo, Units)
        self.qk = qk
        self.vo = vo
