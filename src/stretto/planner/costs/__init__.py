"""What a motif takes: prices from models and measurements."""
