"""Target models: the decoder and one config reader with its key table for each family."""
