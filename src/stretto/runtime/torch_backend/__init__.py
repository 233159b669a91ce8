"""The PyTorch backend `stretto`: collectives of torch.distributed on the executor."""
