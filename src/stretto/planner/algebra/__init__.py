"""Motifs: how a comm-op is cut into pieces, the rules that rewrite it, and its program."""
