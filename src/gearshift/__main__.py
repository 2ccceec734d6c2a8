"""`python -m gearshift` is the console script."""

from gearshift.deployments.cli import main

if __name__ == "__main__":
    main()
