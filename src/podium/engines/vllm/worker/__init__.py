"""Code for vLLM's own workers. This folder goes on the server's PYTHONPATH, and nothing else of Podium."""
