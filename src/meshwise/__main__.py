"""Run the command `meshwise` as `python -m meshwise`."""

from meshwise.cli import main

if __name__ == "__main__":
    main()
