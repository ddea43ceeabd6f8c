from ._fit import fit as fit
from ._run import History as History
from ._run import Run as Run
from ._state import TrainState as TrainState
from ._state import init as init
from ._step import Metrics as Metrics
from ._step import Step as Step
from ._step import make_step as make_step
