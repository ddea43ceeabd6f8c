"""Training and prediction on many workers: shards of an ensemble on any executor, with the results of one process."""

from ._fit import fit as fit
from ._predict import map_members as map_members
from ._predict import predict as predict
from ._shard import ShardReport as ShardReport
from ._sharded_run import ShardedRun as ShardedRun
from ._sharded_run import open_run as open_run
