"""Logged lists: tables with one row per (request, item) or per request, and SVMlight and LETOR files."""
