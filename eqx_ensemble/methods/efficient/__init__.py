"""Efficient ensembles: one model that holds several sub-members, which share weights or one forward pass.

Each function converts an ordinary model. The sub-members are trained jointly, as ONE member of an
`eqx_ensemble.Ensemble`.
"""

from ._convert import batch_ensemble as batch_ensemble
from ._convert import masksembles as masksembles
from ._convert import mimo as mimo
from ._convert import packed_ensemble as packed_ensemble
from ._convert import tabm as tabm
from ._joint import JointEnsemble as JointEnsemble
from ._joint import as_members as as_members
from ._joint import mean_loss as mean_loss
from ._joint import members as members
from ._joint import weight_labels as weight_labels
