"""`python -m api` is `overwinter`."""

from api.cli import main

if __name__ == "__main__":
    main()
