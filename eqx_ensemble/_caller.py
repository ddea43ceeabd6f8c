"""The public function that the user's code called, for messages; it is found only when one is written."""

import sys
import types
from collections.abc import Collection

_OWN = __name__.partition(".")[0]
_LIBRARIES = frozenset(  # whose frames may lie between two of ours
    "abc beartype cloudpickle concurrent contextlib copy dataclasses distributed equinox functools importlib jax "
    "jaxlib jaxtyping joblib numpy optax pickle sklearn threading".split()
)
# Which call what users pass: `combine=ee.combine.mixture`.
_OF_USERS = (f"{_OWN}._predict", f"{_OWN}.scores._bootstrap")
_HIDDEN = ("__call__", "__init__", "__post_init__", "__check_init__", "__new__")  # named by their class
_ACTS_AS = {  # what messages name differently, whoever called it
    "train._step.Step.__call__": "train.make_step",
}


def caller() -> str:
    """The public name, without the package, of the function that was called from outside of this library.

    Without public frames around it, as in a thread of our own, the outermost private function.
    """
    frame: types.FrameType | None = sys._getframe(1)
    found, outermost = "", ""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        package = module.partition(".")[0]
        if package == _OWN:
            acts_as = _acts_as(frame, module)
            if acts_as:
                return acts_as
            if found not in ("", "predict") and module.startswith(_OF_USERS):
                return found
            found = _public_name(frame, module) or found
            outermost = frame.f_code.co_qualname.partition(".<locals>")[0]
        elif found and package not in _LIBRARIES:
            return found
        frame = frame.f_back
    return found or outermost


def _acts_as(frame: types.FrameType, module: str) -> str:
    """The name that a frame has in messages by the table or by an attribute `public_name`; empty for most."""
    code = frame.f_code
    if "_public_name" in code.co_varnames:
        return frame.f_locals["_public_name"]
    if code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
        own = getattr(frame.f_locals["self"], "__dict__", {}).get("public_name")
        if own:
            return own
    return _ACTS_AS.get(f"{module.removeprefix(f'{_OWN}.')}.{code.co_qualname}", "")


def _public_name(frame: types.FrameType, module: str) -> str:
    """The public name of the function of a frame; empty for private functions."""
    code = frame.f_code
    name = code.co_qualname.partition(".<locals>")[0]
    owner, _, last = name.rpartition(".")
    if owner and code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
        kinds = (kind for kind in type(frame.f_locals["self"]).__mro__ if kind.__module__.partition(".")[0] == _OWN)
        kind = next((kind for kind in kinds if not kind.__name__.startswith("_")), None)
        if kind is None:
            return ""
        module, owner = kind.__module__, kind.__name__
    if last.startswith("_") and not last.startswith("__"):
        return ""
    path = owner if last in _HIDDEN else f"{owner}.{last}" if owner else last
    return _public_path(module, path) if path else ""


def _public_path(module: str, path: str) -> str:
    """The name with its public package; empty for one that no public package exports."""
    parts = module.split(".")
    public = parts[: next((i for i, part in enumerate(parts) if part.startswith("_")), len(parts))]
    name = path.partition(".")[0]
    around = (public[:count] for count in range(len(public), 0, -1))
    home = next((home for home in around if name in _exports(".".join(home))), None)
    return "" if home is None else ".".join([*home[1:], path])


def _exports(package: str) -> Collection[str]:
    return getattr(sys.modules[package], "__all__", vars(sys.modules[package]))
