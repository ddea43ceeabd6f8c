"""Several processes on this machine that run one program: `python -m eqx_ensemble.launch -n 2 script.py`.

JAX starts no processes, and what does needs Open MPI, PyTorch or a cluster. With a loop of a shell instead, one process
that fails leaves the others waiting for JAX's timeouts, lines of all are mixed, and Ctrl-C leaves some behind: that is
what this program is for, and no more.
"""

from ._main import main as main
