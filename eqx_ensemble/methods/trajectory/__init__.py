"""Averages, SWAG and snapshots of the weights along a training run, and BatchNorm statistics for them.

Wrappers of optax optimisers record each member's weights in its optimiser state; functions of the run turn these
records into ensembles.
"""

from ._batch_norm import update_batch_norm as update_batch_norm
from ._collect import average as average
from ._collect import sample as sample
from ._collect import snapshot_ensemble as snapshot_ensemble
from ._collect import snapshot_owners as snapshot_owners
from ._record import ema as ema
from ._record import snapshots as snapshots
from ._record import swa as swa
from ._record import swag as swag
