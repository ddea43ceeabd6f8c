"""`project` is a package of its own, whose tests are run by a child process as its developers would run them."""

collect_ignore = ["project", "programs"]
