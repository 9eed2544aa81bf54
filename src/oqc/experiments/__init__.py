"""Runs by name, and suites of them."""
