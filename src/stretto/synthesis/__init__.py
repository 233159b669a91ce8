"""New algorithms for a given cluster: from sketches, by exact search, by flows and trees, and greedily at scale."""
