"""What all scripts have in common: one way to start, to fail, to write and to show progress."""
