"""Rollout engines: prompts in, groups of completions out. They know token ids and weights; they know no rewards."""
