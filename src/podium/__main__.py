"""`python -m podium`, for launchers: `accelerate launch -m podium train run.yaml`."""

from podium.cli import main

if __name__ == "__main__":
    main()
