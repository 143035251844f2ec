"""Calls of a GPU's host API: which, how long, and why (docs/host-calls.md)."""
