"""What the other packages of the library use of `plan`."""

from ._auto import Pilot as Pilot
from ._auto import as_plan as as_plan
from ._auto import explain_memory as explain_memory
from ._map import call_members as call_members
from ._map import map_members as map_members
from ._memory import Cost as Cost
from ._memory import cost_of as cost_of
from ._memory import free_bytes as free_bytes
from ._memory import peak as peak
from ._memory import release_memory as release_memory
from ._plans import sharded_plan as sharded_plan
