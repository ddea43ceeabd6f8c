"""What the other packages of the library use of `plan`."""

from ._auto import Pilot, as_plan, explain_memory, plan_in_program
from ._map import call_members, map_members, over_members
from ._memory import Cost, cost_of, free_bytes, peak, release_memory
from ._plans import FEWEST, NamedVmap, axes_of, sharded_plan
