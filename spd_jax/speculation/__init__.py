"""The speculation module: aggregation of multi-depth hidden states and a small draft decoder."""
