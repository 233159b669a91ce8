"""The joint search over orders and motifs, and what it is judged by."""
