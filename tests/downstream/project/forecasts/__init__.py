"""Forecasts of a series by an ensemble of recurrent networks: a package that depends on `eqx_ensemble`."""

import jaxtyping

with jaxtyping.install_import_hook("forecasts", "beartype.beartype"):
    from ._data import make_series as make_series
    from ._data import make_windows as make_windows
    from ._files import load as load
    from ._files import save as save
    from ._judge import disagreement as disagreement
    from ._judge import judge as judge
    from ._judge import late_members as late_members
    from ._loop import StopBelow as StopBelow
    from ._loop import outputs as outputs
    from ._loop import train_members as train_members
    from ._model import Cell as Cell
    from ._model import Forecast as Forecast
    from ._model import Forecaster as Forecaster
    from ._train import fine_tune as fine_tune
    from ._train import loss as loss
    from ._train import make_optimiser as make_optimiser
    from ._train import train as train
