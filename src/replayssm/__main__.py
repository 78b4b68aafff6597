"""``python -m replayssm``: the command line without an installed script."""

from replayssm.cli.main import main

if __name__ == "__main__":
    main()
