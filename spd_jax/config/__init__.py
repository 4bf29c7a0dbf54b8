"""Plain values that describe a model and a run."""
