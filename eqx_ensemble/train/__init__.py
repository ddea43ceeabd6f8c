from .. import _suggest
from ._callback import Callback as Callback
from ._callback import Progress as Progress
from ._callback import every as every
from ._options import Checkpoint as Checkpoint
from ._options import Stopping as Stopping
from ._options import Validation as Validation
from ._project import project as project
from ._revive import Revival as Revival
from ._revive import Revive as Revive
from ._revive import perturb as perturb
from ._revive import revive as revive
from ._scan_steps import scan_steps as scan_steps
from ._state import TrainState as TrainState
from ._state import init as init
from ._status import DivergedError as DivergedError
from ._status import NotSavedError as NotSavedError
from ._status import Status as Status
from ._step import Metrics as Metrics
from ._step import Step as Step
from ._step import make_step as make_step
from ._together import Together as Together
from ._trainable import Frozen as Frozen
from .data._reader import RowReader as RowReader
from .host._record import History as History

_suggest.explain_names(__name__)
