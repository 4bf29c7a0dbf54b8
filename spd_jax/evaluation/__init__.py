"""Figures of merit and the reports made of them."""
