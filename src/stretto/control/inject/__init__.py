"""The folder that `stretto run` puts in front of PYTHONPATH; nothing else may be in it."""
