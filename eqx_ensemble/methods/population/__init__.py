"""Operations on the training state between runs: rank, select, copy and stop members, set their hyper-parameters.

Weights, optimiser states, hyper-parameters, ids and random streams are moved together, in one gather.
"""

from ._decisions import clone as clone
from ._decisions import perturb_hyper as perturb_hyper
from ._decisions import rank as rank
from ._decisions import select as select
from ._decisions import set_hyper as set_hyper
from ._decisions import stop as stop
from ._decisions import truncation as truncation
