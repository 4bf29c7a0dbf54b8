"""Caches with rollback by counters: a committed region and a window of in-flight columns."""
