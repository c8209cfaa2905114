"""Drift split over the rounding sites that cause it, in shares that add up. Source: docs/attribution.md."""
