"""PyTorch: a step run on fake tensors, recorded."""
