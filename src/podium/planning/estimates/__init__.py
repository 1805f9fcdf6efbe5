"""An estimate of a run before it starts: memory, from the model's config alone."""
