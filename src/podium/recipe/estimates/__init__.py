"""What a run will take, before it runs: memory from the model's config alone, time from a short measurement."""
