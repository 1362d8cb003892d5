"""Tests that plug-in authors can run against their own losses, operators and objectives."""
