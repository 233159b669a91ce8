"""Runs a training step the way a plan says."""
