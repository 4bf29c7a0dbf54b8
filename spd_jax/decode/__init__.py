"""Decoding: sampling, verification, the pipelined prefill, the cycle and its loop, and autoregressive decoding."""
