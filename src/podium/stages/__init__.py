"""Runs of several stages: supervised fine-tuning first, then GRPO for a format, then for what is right, and so on."""
