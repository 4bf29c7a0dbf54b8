"""Neural network building blocks: Flax NNX modules without knowledge of stages, caches or meshes."""
