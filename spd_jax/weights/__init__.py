"""Weights and tokenizers: files in, canonical tensors and ids out."""
