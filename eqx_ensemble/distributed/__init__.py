from ._arrays import agreed as agreed
from ._arrays import fetch as fetch
from ._initialise import Processes as Processes
from ._initialise import initialise as initialise
from ._initialise import is_first as is_first
from ._initialise import shutdown as shutdown
