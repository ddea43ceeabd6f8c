from .. import _suggest
from ._describe import Placement as Placement
from ._describe import describe as describe
from ._describe import visualise as visualise
from ._layout import Shard as Shard
from ._layout import by_largest_axis as by_largest_axis
from ._mesh import Collective as Collective
from ._mesh import collectives as collectives
from ._shard import batch as batch
from ._shard import local_rows as local_rows

_suggest.explain_names(__name__)
