"""The motif algebra: how a comm-op is divided into motifs, the rules that rewrite motifs, and their programs."""
