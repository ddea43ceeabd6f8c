"""Efficient ensembles: one model that holds several sub-members, which share weights or one forward pass.

Each function converts an ordinary model. The sub-members are trained jointly, as ONE member of an
`eqx_ensemble.Ensemble`.
"""

from ._batch_ensemble import batch_ensemble as batch_ensemble
from ._batch_ensemble import masksembles as masksembles
from ._batch_ensemble import tabm as tabm
from ._joint import JointEnsemble as JointEnsemble
from ._loss import as_members as as_members
from ._loss import mean_loss as mean_loss
from ._loss import members as members
from ._loss import weight_labels as weight_labels
from ._packed import mimo as mimo
from ._packed import packed_ensemble as packed_ensemble
