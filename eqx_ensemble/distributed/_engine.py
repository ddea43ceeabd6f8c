"""What the other packages of the library use of `distributed`."""

from ._arrays import all_gather as all_gather
from ._arrays import largest as largest
from ._arrays import raise_on_all as raise_on_all
