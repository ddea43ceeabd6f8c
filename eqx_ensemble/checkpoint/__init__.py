from .. import _suggest
from ._checkpoints import Checkpoints as Checkpoints
from ._checkpoints import Restored as Restored
from ._contents import Contents as Contents
from ._contents import contents as contents
from ._contents import verify as verify
from ._exit import exit_on_signal as exit_on_signal

_suggest.explain_names(__name__)
