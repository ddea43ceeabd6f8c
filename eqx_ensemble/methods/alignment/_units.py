from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from ..._check import check_positive_int
from ._check import check_entries, check_heads

Entry = Callable[[Any], Any] | tuple[Callable[[Any], Any], int]
"""What selects a layer of a model; or an array, and one of its axes."""


class Units(eqx.Module):
    """Hidden units that may change their order: the layers that make them, and the layers that read them.

    Channels of a convolution, and the entries of a residual stream, are units too. A layer is selected as in
    `equinox.tree_at`, and its axes are known for `equinox.nn.Linear`, `Conv`, `ConvTranspose`, `Embedding`,
    `LayerNorm`, `RMSNorm`, `GroupNorm`, `BatchNorm` (with its running statistics), `PReLU`, `MLP` and
    `MultiheadAttention`. For all others select arrays, each with its axis: `(lambda model: model.scale, 0)`.

    A layer that reads several entries for each unit, such as the first one after channels were flattened, has to hold
    them one unit after another, as `jnp.ravel` of an array `(channels, height, width)` does.

    **Arguments:**

    - `outputs`: all that makes these units, or has one value for each of them: the layer before, norms, depthwise
        convolutions. A residual stream has every layer that adds to it.
    - `inputs`: all layers that read these units.
    - `size`: how many units there are; by default the size of the first of `outputs`. Fewer permute as blocks of equal
        size.

    **Raises:** `TypeError` for entries that do not select anything.

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
    """Heads of attention that may change their order, and the units inside each head.

    Heads move as a whole; inside a head, its queries and keys have an order of their own, and its values another. Axes
    hold one head after another. `equinox.nn.MultiheadAttention` is found by
    [`eqx_ensemble.methods.alignment.find_units`][]. Where positions rotate queries and keys, units inside the heads are
    not free: use `Units(..., size=num_heads)`.

    **Arguments:**

    - `num_heads`: how many heads there are.
    - `qk`: [`eqx_ensemble.methods.alignment.Units`][] of queries and keys, for example with their two layers as
        `outputs`.
    - `vo`: those of the values, which the layer after the heads reads.

    **Raises:** `TypeError` for parts that are not `Units`.

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
