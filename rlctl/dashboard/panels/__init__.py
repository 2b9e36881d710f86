"""Panels of the dashboard: each a pure function from a RunState and a size to rows of text."""
