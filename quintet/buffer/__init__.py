"""Experience Buffer: the group state machine and its redo log."""
