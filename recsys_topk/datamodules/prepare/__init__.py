"""Preparation of users' tables: working files that a later process resumes from, and prepared files."""
