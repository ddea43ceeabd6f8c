from .. import _suggest
from ._checkpoints import Checkpoints as Checkpoints
from ._checkpoints import Contents as Contents
from ._checkpoints import Restored as Restored
from ._checkpoints import contents as contents
from ._checkpoints import verify as verify
from ._exit import exit_on_signal as exit_on_signal

_suggest.explain_names(__name__)
