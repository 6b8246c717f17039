"""What holds for a Keras model on every backend, in Keras's own terms."""
