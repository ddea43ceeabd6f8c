"""Averages, SWAG and snapshots of the weights along a training run, with schedules and BatchNorm statistics for them.

Wrappers of optax optimisers record each member's weights in its optimiser state; functions of the run turn these
records into ensembles.
"""

from ._average import average as average
from ._average import ema as ema
from ._average import swa as swa
from ._batch_norm import update_batch_norm as update_batch_norm
from ._snapshots import fast_geometric_schedule as fast_geometric_schedule
from ._snapshots import snapshot_ensemble as snapshot_ensemble
from ._snapshots import snapshot_owners as snapshot_owners
from ._snapshots import snapshot_schedule as snapshot_schedule
from ._snapshots import snapshots as snapshots
from ._swag import sample as sample
from ._swag import swag as swag
