"""A log or an exception → why it failed. Pure: it reads text and nothing else."""
