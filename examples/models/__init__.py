"""Small models that train on CPU ranks: a DLRM and a GPT."""
