"""Measurements: what the service costs, as ratios to local attention in the same run."""
