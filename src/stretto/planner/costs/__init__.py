"""The cost of a motif, from simulation and from measurements."""
