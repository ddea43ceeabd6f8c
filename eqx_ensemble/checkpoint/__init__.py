from ._checkpoints import Checkpoints as Checkpoints
from ._checkpoints import Restored as Restored
from ._exit import exit_on_signal as exit_on_signal
from ._formats import Contents as Contents
from ._formats import contents as contents
from ._formats import verify as verify
