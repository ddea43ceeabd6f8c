from ._arrays import agreed as agreed
from ._arrays import fetch as fetch
from ._arrays import is_first as is_first
