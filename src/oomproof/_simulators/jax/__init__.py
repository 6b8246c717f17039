"""JAX: a step as XLA would plan it, from its jaxpr or compiled and not run."""
