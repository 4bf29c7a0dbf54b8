"""Things that tests need and that ship with the library: random weights, models in memory."""
