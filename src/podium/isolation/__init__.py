"""Code of others in processes that can be killed: workers for user files, a sandbox for model code."""
