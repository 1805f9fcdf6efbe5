"""Podium against TRL, generation engines against each other, and how cost grows."""
