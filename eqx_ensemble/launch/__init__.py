"""Several processes on this machine that run one program: `python -m eqx_ensemble.launch -n 2 script.py`.

JAX starts no processes, and other launchers need Open MPI, PyTorch or a cluster. With a shell loop, a process that
fails leaves the others waiting for JAX's timeouts, lines of output are mixed, and Ctrl-C leaves processes behind. This
launcher solves these problems and nothing else.
"""

from ._main import main as main
