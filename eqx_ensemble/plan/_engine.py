"""What the other packages of the library use of `plan`."""

from ._argument import as_plan, explain_memory, plan_in_program
from ._map import call_members, map_members, over_members
from ._memory import Cost, cost_of, free_bytes
from ._plans import FEWEST, NamedVmap, Work, axes_of, sharded_plan
