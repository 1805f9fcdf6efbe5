"""Runs of several stages: supervised fine-tuning first, then GRPO for a format, then for what is right, and so on.

recipe.stages   what each stage is, resolved before anything starts
gates           when one ends
running         the loop
carry           what crosses the border between two
keeper, sft     a callback that watches a gate; a stage of TRL's SFT
"""
