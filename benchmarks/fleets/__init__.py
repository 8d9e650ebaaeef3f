"""Scenes of simulated fleets and what is asked of the router's policies in them."""
