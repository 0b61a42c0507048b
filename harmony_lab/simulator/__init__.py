"""Predicting a Program's Trace: a deterministic discrete-event simulation."""
