"""Ways to find out how much memory a step takes."""
