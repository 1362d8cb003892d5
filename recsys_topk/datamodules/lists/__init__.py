"""Logged lists: rows of (request, item) with labels or stages reached, nested tables, SVMlight and LETOR files."""
