"""Sampling by vLLM, from a copy of the weights that is brought up to date before every generation round.

server.py     a running `vllm serve`: its routes, its silence, its death
weights.py    the policy's tensors as a checkpoint has them, and how they get there: a folder that both see, or NCCL
requests.py   prompts as requests, answers as completions
engine.py     `use_vllm` with `vllm_mode: server`: versions of weights, sessions, a server that dies
colocate.py   the same with an engine in the trainer's process
connect.py    everything that is checked of a server before weights load
teacher.py    another model on a server, which judges tokens

Nothing imports it but `engines.table`, by the names of its modules.
"""
