"""Pipelines that users have: read, judged, and built again within a budget."""
