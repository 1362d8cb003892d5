"""Tables and plots from runs."""
