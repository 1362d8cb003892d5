"""Interactions of users with items, from files or frames of any common format: who, what, when."""
