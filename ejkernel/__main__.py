"""`python -m ejkernel`: the same as the command `ejkernel`."""

from ejkernel.cli import main

if __name__ == "__main__":
    main()
