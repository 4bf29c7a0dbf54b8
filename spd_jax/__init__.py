"""Speculative Pipeline Decoding (SPD, arXiv 2605.30852) in JAX.

The target model is cut into pipeline stages, and a small draft reads what the stages hold to predict the next token, so
that one sequence keeps every stage busy. Import what you need from the subpackages: this file holds the version and
imports nothing.
"""

__version__ = "0.1.0"
