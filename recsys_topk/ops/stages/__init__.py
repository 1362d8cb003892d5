"""Inner loops of stages: tables, attention, first layers, dot products."""
