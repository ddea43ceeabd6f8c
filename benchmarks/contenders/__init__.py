"""Ways to spend the same number of member-steps: every function here trains by a task, and gives a `Fitted`."""
