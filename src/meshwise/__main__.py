"""`python -m meshwise` is the command `meshwise`."""

from meshwise.cli import main

if __name__ == "__main__":
    main()
