"""The executor: runs lowered programs on this machine's memory and network."""
