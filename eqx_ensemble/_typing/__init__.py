from ._stacked import HoldsMembers as HoldsMembers
from ._stacked import Stacked as Stacked
from ._stacked import kind_of_members as kind_of_members
