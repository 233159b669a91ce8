"""Measuring the links of a cluster and the collectives on it."""
