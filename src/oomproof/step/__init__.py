"""The transactional step in framework-free terms: how a batch is split, and what follows a failure."""
