"""Texts, costs and rules to replay DSpark's verification budget over."""
