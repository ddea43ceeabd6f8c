"""What the other packages of the library use of `sharding`."""

from ._check import check_shard_rule, warn_of_padding
from ._layout import (
    FREE,
    Layout,
    as_layout,
    constrain_carry,
    constrain_member,
    constrain_members,
    constrain_rows,
    layout_for,
    spans_processes,
)
from ._mesh import make_mesh
from ._shard import (
    check_same_in_processes,
    local_block,
    pad_members,
    put,
    replicate,
    replicate_rows,
    rows_sharding,
    shard_members,
    shard_rows,
)
