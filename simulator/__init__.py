"""Simulated engines and fleets: what tries the router's own policies without a GPU."""
