from ._signatures import CallableEnsemble as CallableEnsemble
from ._signatures import MappedFunction as MappedFunction
from ._signatures import Out as Out
from ._signatures import P as P
from ._signatures import StatefulEnsemble as StatefulEnsemble
from ._stacked import Stacked as Stacked
from ._stacked import kind_of_members as kind_of_members
