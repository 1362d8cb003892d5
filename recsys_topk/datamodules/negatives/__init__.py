"""Sampled negatives: draws from a catalogue or a batch, and their inclusion probabilities."""
