"""What one GPU has to show, without a network: correctness, decoding, a pack, memory, two processes. See `run.sh`."""
