"""Training that survives running out of memory: guard, the driver of its batches, proofs."""
