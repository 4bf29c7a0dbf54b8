"""Training speculation modules: distillation of a frozen target with simulated fill of the pipeline."""
