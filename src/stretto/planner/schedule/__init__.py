"""The joint search over orders and motifs, and the schedules, bounds and simulations that it is judged by."""
