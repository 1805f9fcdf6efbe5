"""`podium` and `python -m podium`: the command line, and Ctrl-C while its modules load."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from podium.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
