"""Runs of several stages: supervised fine-tuning first, then GRPO for a format, then for what is right, and so on.

plan            `stages:` of a recipe, resolved: a recipe for each stage
gates           conditions on metrics that end a stage
completions     the right completion of a row, for a stage of supervised fine-tuning
running         the loop
handover        moves optimizer, schedule and reference from one stage to the next
gate_callback   stops a stage when its gate is met
sft             a stage of TRL's SFT
api             `Stages`, the same from Python
"""
