"""Speculation modules on files of prompts: their acceptance, kept as samples, summed up in tables and pictures."""
