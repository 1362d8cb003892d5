"""Readers of tables in all supported formats, and conversions of their columns and times."""
