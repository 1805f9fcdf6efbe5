"""What is printed around a run, by the command line and by the trainer in Python."""
