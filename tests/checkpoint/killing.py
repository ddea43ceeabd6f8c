"""Kills a process that saves, again and again, at random moments; run by `test_commit`, in a process of its own.

`killing.py FOLDER KILLS MODE` prints a JSON object: how often it killed, how many saves were finished, and how many
times no whole checkpoint, or an older one than the last finished, was left.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import equinox as eqx
import numpy as np

import eqx_ensemble as ee


def tree(version):
    return {"a": np.full(5, version), "b": np.full(40_000, version)}


def save_all(folder, mode, pipe, version):
    checkpoints = ee.checkpoint.Checkpoints(folder / "run", last=2, asynchronous=True)
    while True:
        version += 1
        if mode == "numbered":
            checkpoints.save(version, tree(version))
            checkpoints.wait()
        elif mode == "overwrite":
            ee.save(folder / "x", tree(version))
        else:
            eqx.tree_serialise_leaves(folder / "x.eqx", tree(version))
        os.write(pipe, version.to_bytes(8, "little"))


def version_at(folder, mode):
    if mode == "numbered":
        got = ee.checkpoint.Checkpoints(folder / "run").restore(tree(0)).tree
    elif mode == "overwrite":
        got = ee.load(folder / "x", tree(0))
    else:
        got = eqx.tree_deserialise_leaves(folder / "x.eqx", tree(0))
    (version,) = {*got["a"].tolist(), *got["b"].tolist()}
    return version


def finished(pipe):
    """The last version that the child had saved."""
    versions = b""
    while part := os.read(pipe, 8192):
        versions += part
    count = len(versions) // 8
    return count, int.from_bytes(versions[8 * count - 8 : 8 * count], "little") if count else 0


def killed_often(folder, kills, mode):
    """The numbers of kills, of completed saves, and of losses."""
    moments = random.Random(0)
    killed = saves = lost = version = 0
    while killed < kills:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                save_all(folder, mode, writing, version)
            finally:
                os._exit(1)
        os.close(writing)
        first = os.read(reading, 8)  # the child has saved once, so that something can be lost
        time.sleep(moments.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        count, last = finished(reading)
        os.close(reading)
        last = max(last, int.from_bytes(first, "little"))
        saves += 1 + count
        try:
            now = version_at(folder, mode)
        except Exception:
            now = -1
        lost += now < last
        version = max(now, last)
    return {"killed": killed, "saves": saves, "lost": lost}


if __name__ == "__main__":
    print(json.dumps(killed_often(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
