"""`python -m rlctl`: the program that is installed as `rlctl`."""

from rlctl.cli.main import main

if __name__ == "__main__":
    main()
