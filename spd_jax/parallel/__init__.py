"""The stage mesh: devices, slots of layers per rank, vocabulary-sharded tables."""
