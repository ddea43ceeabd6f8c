"""Names of `eqx_ensemble` used for the first time by several threads at once, again and again."""

import importlib
import random
import sys
import threading
import time

import equinox  # noqa: F401 (so that only our own modules are imported again)
import jax.numpy  # noqa: F401
import optax  # noqa: F401

ROUNDS, THREADS = int(sys.argv[1]), 6


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "eqx_ensemble"]:
        del sys.modules[name]


def use(package, names, delay, problems):
    time.sleep(delay)
    for name in names:
        try:
            getattr(package, name)
        except BaseException as problem:
            problems.append(f"{name}: {problem!r}")


sys.setswitchinterval(1e-5)
problems = []
for number in range(ROUNDS):
    forget()
    package = importlib.import_module("eqx_ensemble")
    names = [name for name in package.__all__ if name not in ("sklearn", "plot")]
    draw = random.Random(number)
    # Some begin while others are in the middle of an import.
    own = [(draw.sample(names, len(names)), draw.uniform(0, 0.1)) for _ in range(THREADS)]
    threads = [threading.Thread(target=use, args=(package, *each, problems)) for each in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(*problems[:5], sep="\n")
print(f"first imports: {len(problems)} problems in {ROUNDS} rounds")
