"""The built-in tools. `make` of each module takes the settings behind the question mark and returns the function."""
