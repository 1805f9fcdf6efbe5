"""Runs of several stages: supervised fine-tuning first, then GRPO for a format, then for what is right, and so on.

running         the loop
handover        moves the policy, the reference and the data from one stage to the next
gate_callback   stops a stage when its gate opens
sft             a stage of TRL's SFT
api             `Stages`, the same from Python
"""
