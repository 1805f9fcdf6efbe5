"""Code of others in processes that can be killed: workers for user files and libraries, a sandbox for model code."""
