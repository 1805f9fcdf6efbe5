"""What vLLM loads into its own workers. This folder goes on the server's PYTHONPATH, and nothing else of Podium."""
