class MemberMismatchError(ValueError):
    """Members that cannot stand in one stacked tree: they differ in structure, shape, dtype or a static value."""
