"""Sources of data larger than memory."""
