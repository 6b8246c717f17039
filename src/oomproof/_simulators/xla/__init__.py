"""Programs compiled by XLA for a GPU that need not be there, whichever framework they come from."""
