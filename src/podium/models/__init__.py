"""Models: loading, adapters, the shared-prefix attention."""
