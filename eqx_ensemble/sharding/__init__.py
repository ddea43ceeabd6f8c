from .. import _suggest
from ._collectives import Collective as Collective
from ._collectives import collectives as collectives
from ._describe import Placement as Placement
from ._describe import describe as describe
from ._describe import visualise as visualise
from ._rows import batch as batch
from ._rows import local_rows as local_rows
from ._weights import Shard as Shard
from ._weights import by_largest_axis as by_largest_axis

_suggest.explain_names(__name__)
