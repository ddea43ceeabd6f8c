"""What the other packages of the library use of `sharding`."""

from ._check import check_shard_rule as check_shard_rule
from ._check import warn_of_padding as warn_of_padding
from ._check import warn_of_uneven_rows as warn_of_uneven_rows
from ._layout import FREE as FREE
from ._layout import Layout as Layout
from ._layout import as_layout as as_layout
from ._layout import constrain_carry as constrain_carry
from ._layout import constrain_member as constrain_member
from ._layout import constrain_members as constrain_members
from ._layout import constrain_rows as constrain_rows
from ._layout import layout_for as layout_for
from ._layout import spans_processes as spans_processes
from ._mesh import make_mesh as make_mesh
from ._shard import check_same_in_processes as check_same_in_processes
from ._shard import local_block as local_block
from ._shard import pad_members as pad_members
from ._shard import put as put
from ._shard import replicate as replicate
from ._shard import replicate_rows as replicate_rows
from ._shard import rows_sharding as rows_sharding
from ._shard import shard_members as shard_members
from ._shard import shard_rows as shard_rows
