import importlib.metadata

__version__ = importlib.metadata.version("eqx_ensemble")
