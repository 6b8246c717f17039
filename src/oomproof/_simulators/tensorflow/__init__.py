"""TensorFlow's graph mode: a step as its executor and its kernels would allocate."""
