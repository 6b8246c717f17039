"""Looks at a machine before training does. No framework is imported, and nothing is changed."""
