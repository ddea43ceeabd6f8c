"""Decisions between runs, on the training state of all members: who is best, who goes on, who becomes a copy of whom.

Each moves weights, optimiser states, hyper-parameters, ids and random streams together, in one gather.
"""

from ._decisions import change as change
from ._decisions import explore as explore
from ._decisions import truncation as truncation
from ._moves import clone as clone
from ._moves import rank as rank
from ._moves import select as select
from ._moves import stop as stop
