"""Processes that a test starts, and what they print."""

import subprocess
import tempfile


class Child:
    """A process that prints into files: one that prints much never waits for the test, or for its sibling, to read."""

    def __init__(self, command, env, *, text=None):
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as typed:
            typed.write((text or "").encode())
            typed.seek(0)
            own = {} if text is None else {"stdin": typed}
            self.process = subprocess.Popen(command, env=env, stdout=self._out, stderr=self._err, **own)

    def finish(self, timeout):
        """Its exit code and the texts of both streams, once it has ended."""
        code = self.process.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return code, *texts

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()
