"""Tools, environments and several turns."""
