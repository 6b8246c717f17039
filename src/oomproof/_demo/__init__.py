"""`oomproof demo`: the same training four times, on TensorFlow's real allocator, measured side by side."""
