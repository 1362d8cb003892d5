"""Interactions of users with items, read from files or data frames of any common format."""
