"""Training data: conversations read, labelled, prepared on disk and packed into batches."""
