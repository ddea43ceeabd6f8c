"""How pytest-xdist divides tests among its workers, with `--dist loadgroup`."""

import contextlib

# One worker runs all tests of each of these, in turn: what they make once, they make once, and processes that wait for
# each other have the machine. By path, because marks of groups do nothing from pytest 9.2 on.
GROUPS = {
    "tests/distributed/": "processes",
    "tests/sharding/test_processes.py": "processes",
    "tests/downstream/": "downstream",
    "tests/test_distributions.py": "distributions",
    "tests/test_notebooks.py": "notebooks",
}


def group_of(nodeid):
    return next((group for path, group in GROUPS.items() if nodeid.startswith(path)), nodeid)


def make_scheduler(config, log):
    """A scheduler of groups.

    That of pytest-xdist submits the test in which a worker crashed again, and its replacement then waits for ever.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

        def remove_node(self, node):
            """Submits the tests of a crashed worker again, except the one that crashed it, which has failed."""
            units = self.assigned_work.pop(node)
            left = [(scope, nodeid) for scope, unit in units.items() for nodeid, done in unit.items() if not done]
            if not left:
                return None
            scope, crashed = left[0]
            units[scope][crashed] = True
            self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node):
            if node in self.registered_collections:  # not one that replaces a crashed worker and has not begun
                with contextlib.suppress(OSError):  # crashed too: its tests are submitted again when that is known
                    super()._reschedule(node)

        def schedule(self):
            """Tells workers that there is nothing else: until then they hold back their last test."""
            super().schedule()
            if not self.workqueue:
                for node in self.nodes:
                    node.shutdown()

    return GroupScheduling(config, log)
