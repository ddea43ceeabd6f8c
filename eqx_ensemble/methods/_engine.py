"""What the other packages of the library use of `methods`."""

from ._protocol import loss_of_outputs
