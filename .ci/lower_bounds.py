"""Prints the lower bounds of `pyproject.toml` as constraints for pip: those of the dependencies and of extras named."""

import pathlib
import re
import sys
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in sys.argv[1:])]
for requirement in sum(groups, []):
    print(re.sub(r"^([\w-]+)>=([\d.]+).*", r"\1==\2", requirement))
