"""From a model and the memory there is to a way to run the batch that was asked for."""
