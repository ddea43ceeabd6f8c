from ._contents import Contents as Contents
from ._contents import contents as contents
from ._contents import verify as verify
from ._folder import Checkpoints as Checkpoints
from ._folder import Restored as Restored
